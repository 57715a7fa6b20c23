"""The process: how it starts, stands ready, serves until a signal comes, and ends; and the two small programs beside it."""
