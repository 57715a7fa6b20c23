"""The lines between the process and who asks it: commands in, replies out, over a socket or HTTP."""
