"""Messages between the server and a runner: JSON, one value a line, over one socket that belongs to the two alone.

Knows nothing of sockets, HTTP, models or the public APIs. Everything is frozen, typed and checked on arrival:
``decode(CompletionRequest, body)`` raises BadRequest naming the field that is wrong.

Commands go to the runner. From it come lists of Addressed, for all requests together what a step has said; an empty list
is the first, and says that there is a runner. Complete is answered by Pieces, then exactly one Done or Failed; Call by one
Answer or Failed. What may be called, by path:

=============  ====================  =========================================================
/health        –                     Health
/occupancy     –                     Occupancy
/load          LoadRequest           LoadReply
/embedding     EmbeddingRequest      EmbeddingReply
/images        ImagesRequest         ImagesReply
/tokenize      TokenizeRequest       Tokens
/detokenize    Tokens                Text
=============  ====================  =========================================================

A runner that a person starts serves the same over HTTP: the paths above, and /completion with lines of replies.

Durations are integer nanoseconds, sizes are bytes, positions and counts are tokens.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from puna.errors import BadRequest

M = TypeVar("M")

MAX_TOP_LOGPROBS = 20
MAX_QUEUED_CHARACTERS = 16 << 20  # text that waits for a reader who does not read
FILL_CONTEXT = -2  # as a number of tokens to predict
_LOGPROB_CHARACTERS = 64


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """Base of all messages."""


# Steps from logits to probabilities, in llama.cpp's order, which is the default. A bias comes before all of them.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
DRY_BREAKERS = ("\n", ":", '"', "*")


class SamplingOptions(Message, frozen=True):
    """How the next token is chosen; the defaults are Ollama's (spec of August 2026), of what Ollama lacks llama.cpp's."""

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = -1
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    samplers: tuple[str, ...] = SAMPLERS
    logit_bias: dict[int, float] = {}  # by token, added to its logit


class Grammar(Message, frozen=True):
    """What the answer must look like. Between thinking tags, if there are any, the model writes what it likes."""

    kind: Literal["json", "json_schema", "regex", "lark"]  # json: any object
    text: str = ""
    thinking_begin: str = ""  # thinking may begin with this; empty: the prompt has begun it
    thinking_end: str = ""  # and ends with this; empty: there is no thinking


class Thinking(Message, frozen=True):
    """How the model marks its thinking, so that the runner can count it, and end it when its budget is spent."""

    begin: str = ""
    end: str = ""
    ending: str = ""  # written where the budget is spent; empty: end
    is_open: bool = False  # the prompt has begun it
    repeats: bool = False  # several times, anywhere; else once, at the very beginning
    budget: int = -1  # tokens of thinking at most, all together, tags excepted; below zero: no limit


class Image(Message, frozen=True):
    """A file of one, and the text that stands for it in the prompt, which nobody who writes prompts can guess."""

    marker: str
    data: bytes


class CompletionRequest(Message, frozen=True):
    prompt: str = ""
    images: list[Image] = []  # each stands in the prompt wherever its marker does
    context: list[int] = []  # tokens that precede the prompt (the deprecated memory of /api/generate)
    sampling: SamplingOptions = SamplingOptions()
    n_ctx: int = 0  # tokens that prompt and answer have room for; 0, or more than the runner's: the runner's
    n_predict: int = -1  # new tokens at most; FILL_CONTEXT: until the context is full, once; else below zero: no limit
    n_keep: int = 4  # tokens kept at the front when the prompt is truncated; below zero: all
    min_tokens: int = 0  # generated before the answer may end with an end token or a stop sequence
    stop: list[str] = []
    ignore_eos: bool = False  # no token that ends the answer is written; a grammar that is complete ends it all the same
    grammar: Grammar | None = None
    thinking: Thinking | None = None  # None: nothing is known of any
    logprobs: bool = False  # of the tokens of the answer
    top_logprobs: int = 0  # so many alternatives to each, up to MAX_TOP_LOGPROBS
    truncate: bool = True  # False: a prompt that is too long is an error
    shift: bool = True  # False: a context that is full ends the answer
    return_tokens: bool = False  # Done.tokens carries prompt and answer
    show_control_tokens: bool = False  # their text is part of the answer; the token that ends it never is
    salt: str = ""  # whose prompt it is: only prompts with the same salt find one another's beginnings in the cache
    request_id: str = ""


class TokenLogprob(Message, frozen=True, omit_defaults=True):
    """A token's probability among all, before temperature and filters."""

    text: bytes  # perhaps part of a character
    logprob: float
    top: list[TokenLogprob] = []  # the likeliest in its place, likeliest first


class Piece(Message, frozen=True, tag_field="type", tag="piece", omit_defaults=True):
    """Some text of the answer: whole characters, never part of a stop sequence."""

    content: str
    logprobs: list[TokenLogprob] = []  # of the tokens whose text begins in this piece; at the end also without text

    @property
    def weight(self) -> int:
        """About as many characters as it takes on its way."""
        return len(self.content) + (_LOGPROB_CHARACTERS * sum(1 + len(e.top) for e in self.logprobs) if self.logprobs else 0)


class Done(Message, frozen=True, tag_field="type", tag="done"):
    reason: Literal["stop", "length", "cancelled"]
    prompt_eval_count: int  # tokens of the prompt after truncation, cached ones included
    cached_count: int  # those of them that were not computed again
    prompt_eval_duration: int
    eval_count: int  # generated tokens, the end-of-generation token included
    eval_duration: int
    tokens: list[int] = []
    stop_sequence: str = ""  # which of the request's ended the answer
    thinking_count: int = 0  # of the generated tokens, those of thinking
    truncated_count: int = 0  # tokens of the prompt that were left out, since they did not fit


class Failed(Message, frozen=True, tag_field="type", tag="failed"):
    """The request ended in an error; status is the HTTP status the client should see."""

    error: str
    status: int = 500
    lacks_model: bool = False  # the runner has none in memory: whoever has loaded one has lost it


class Answer(Message, frozen=True, tag_field="type", tag="answer"):
    """To a call."""

    body: msgspec.Raw


CompletionReply = Piece | Done | Failed
Reply = Piece | Answer | Done | Failed
Addressed = tuple[int, Reply]  # to the command that had this number


class Complete(Message, frozen=True, tag_field="type", tag="complete"):
    id: int  # chosen by the sender, and never again
    request: CompletionRequest


class Call(Message, frozen=True, tag_field="type", tag="call"):
    id: int
    path: str
    body: msgspec.Raw = msgspec.Raw(b"{}")


class Cancel(Message, frozen=True, tag_field="type", tag="cancel"):
    """Nobody waits for the replies to a request any more; the number of one that has ended is no error."""

    id: int


class NameModel(Message, frozen=True, tag_field="type", tag="model"):
    """To a spare runner: which model it is for."""

    path: str


Command = Complete | Call | Cancel | NameModel


class EmbeddingRequest(Message, frozen=True):
    inputs: list[str | list[int]]  # texts, or tokens, special ones included
    images: list[Image] = []  # each stands in the texts wherever its marker does
    truncate: bool = True  # False: an input that is too long is an error
    normalize: bool = True  # to length 1
    dimensions: int = 0  # above zero: only the first so many
    n_ctx: int = 0  # tokens of an input at most; 0, or more than the runner's: the runner's
    query: str | None = None  # the inputs are judged against it: what comes back are scores, the first of each counts
    salt: str = ""  # as CompletionRequest has it
    request_id: str = ""


class EmbeddingReply(Message, frozen=True):
    embeddings: list[list[float]]  # in the order of the inputs
    prompt_eval_count: int  # tokens of all inputs after truncation
    truncated_count: int = 0  # tokens that it left out
    has_probabilities: bool = False  # scores are between 0 and 1 already; else they are logits


class ImagesRequest(Message, frozen=True):
    images: list[bytes]  # files
    salt: str = ""  # as CompletionRequest has it
    n_ctx: int = 0  # as CompletionRequest has it


class ImagesReply(Message, frozen=True):
    n_tokens: list[int]  # that each takes in a prompt


class TokenizeRequest(Message, frozen=True):
    content: str
    add_special: bool = True
    markers: list[str] = []  # of images: they are no text, and their tokens are not counted


class Tokens(Message, frozen=True):
    tokens: list[int]


class Text(Message, frozen=True):
    content: str


class DeviceLayers(Message, frozen=True):
    """Layers [begin, end) of the model live on this device; the output counts as layer n_layers."""

    device: str
    begin: int
    end: int


class LoadOptions(Message, frozen=True):
    """What fixes a runner's memory; a change means loading again."""

    n_ctx: int = 4096  # tokens one sequence may hold
    n_parallel: int = 4  # sequences that may be computed at once
    n_pool: int = 0  # tokens that all sequences together may hold; 0: n_ctx for each of n_parallel
    n_batch: int = 512  # tokens in one step at most
    n_threads: int = 0  # 0: physical cores
    kv_cache_type: Literal["f16", "q8_0", "q4_0"] = "f16"
    flash_attention: bool = True  # False: step by step, for devices without the fused operation
    host_cache_bytes: int = 0  # of the host's memory, beside all else, for prefixes that lose their place in the cache
    token_gap_s: float = 0.15  # how long answers may wait for their next token while prompts are computed; 0: any time
    build_ahead: bool = False  # the next step's graph while a step is computed: takes the working memory twice
    use_mmap: bool | None = None  # None: a small file is read into memory where that makes it faster
    gpu_layers: list[DeviceLayers] = []
    adapters: list[str] = []  # LoRA files that change the weights, in this order
    projector: str = ""  # a file with what encodes images; empty: the model's own file may hold it
    projector_device: str = ""  # where it goes; empty: the CPU
    image_cache_bytes: int = 0  # of the host's memory, for images that are encoded, beyond those that requests still need
    models: str = ""  # the folder of models, where packed weights of other files are kept as well; empty: nowhere


class LoadRequest(Message, frozen=True):
    """fit measures and allocates nothing; alloc allocates; commit reads the weights (poll /health); close frees."""

    operation: Literal["fit", "alloc", "commit", "close"] = "commit"
    options: LoadOptions = LoadOptions()


class DeviceMemory(Message, frozen=True):
    """Bytes on one device. Lists are per layer, the last entry is the output layer."""

    device: str
    weights: list[int]
    cache: list[int]
    graph: int
    is_gpu: bool = False
    projector: int = 0  # what encodes images: its weights, and its working memory for the largest image

    @property
    def total(self) -> int:
        return sum(self.weights) + sum(self.cache) + self.graph + self.projector


class MemoryReport(Message, frozen=True):
    devices: list[DeviceMemory]
    input_weights: int  # host memory of tensors that stay there: token embeddings and the like
    mapped: int = 0  # of the weights above, bytes that are pages of the model file
    host: int = 0  # what else the process keeps for the model: vocabulary, descriptions of graphs, rows of logits

    @property
    def total(self) -> int:
        return self.input_weights + self.host + sum(d.total for d in self.devices)

    @property
    def on_gpus(self) -> int:
        return sum(d.total for d in self.devices if d.is_gpu)


class LoadReply(Message, frozen=True):
    success: bool  # False: there was not enough memory; whatever else fails is an error
    memory: MemoryReport | None = None
    error: str = ""
    n_ctx: int = 0  # after clamping to what the model was trained for
    engine: str = ""  # "puna" or "compat"
    engine_reason: str = ""


class Device(Message, frozen=True):
    """What the tensor library computes on, as `puna discover` found it."""

    name: str  # as DeviceLayers and DeviceMemory name it
    library: str
    kind: Literal["gpu", "igpu", "accel", "cpu", "rpc"]  # igpu: its memory is the host's; rpc: another machine's
    free: int
    total: int
    description: str = ""
    id: str = ""  # where it sits, like 0000:c1:00.0; the same hardware has the same id in every library
    capability: str = ""  # what code it runs, as its driver says: 8.9, gfx1100
    driver: str = ""  # its driver's version


class Discovery(Message, frozen=True):
    devices: list[Device]
    filters: dict[str, str] = {}  # environment variables that hide devices or change how they are seen
    error: str = ""  # why the devices could not be listed
    workers: list[str] = []  # other machines that were asked for theirs, as host:port
    lost: list[str] = []  # why some of them are not used
    physical_cores: int = 0
    threads: int = 0  # a good number of computing threads: control groups may grant less than the machine has


class Health(Message, frozen=True):
    status: Literal["launched", "loading", "ready", "error"]
    progress: float = 0.0  # of the weights, 0 to 1
    error: str = ""
    active: int = 0  # requests being computed
    waiting: int = 0
    steps: int = 0  # engine steps so far: a runner with active requests and no new steps is stuck
    tokens: int = 0  # computed so far, of prompts and answers
    answer_tokens: int = 0  # of them, those of answers
    cache_cells: int = 0  # tokens that the cache can hold; 0: there is no such bound
    cache_used: int = 0  # of them, those that hold a token, of a running request or for a later one
    host_cache_bytes: int = 0  # of the host's memory, taken by prefixes that lost their place in the cache
    host_cache_entries: int = 0  # so many prefixes
    images_encoded: int = 0  # so far
    images_reused: int = 0  # that a request found encoded, by itself or by another
    image_cache_bytes: int = 0  # of the host's memory, taken by encoded images

    @property
    def counts(self) -> dict[str, int]:
        """What only grows as long as the runner lives."""
        names = ("steps", "tokens", "answer_tokens", "images_encoded", "images_reused")
        return {name: getattr(self, name) for name in names}


class HeldSequence(Message, frozen=True):
    """A sequence of the cache in numbers: whoever looks on learns how much is held, never what."""

    sequence: int
    tokens: int  # that the cache holds
    last_used: int  # on a clock of its own: the higher, the later
    node: int = -1  # where it ends: its place in Occupancy.prefixes; -1: that is not told
    state: Literal["idle", "running", "paused"] = "idle"  # paused: gave way to others
    prompt: int = 0  # tokens of the prompt of the request that runs in it
    generated: int = 0  # those that it has added


class SharedPrefix(Message, frozen=True):
    """The tokens [begin, end) that some sequences have in common, as a node of a tree."""

    parent: int  # its place in Occupancy.prefixes, before this one; -1: there is none
    begin: int
    end: int  # those that are still to be computed included
    sequences: int  # so many come here


class SavedPrefix(Message, frozen=True):
    tokens: int
    bytes: int


class Occupancy(Message, frozen=True):
    """What the cache and the host cache hold, at one moment of work that goes on; lists are cut at MAX_TOLD."""

    computed: int = 0  # tokens that the engine has computed so far
    sequences: list[HeldSequence] = []  # those that hold something, used last first
    prefixes: list[SharedPrefix] = []
    host_cache: list[SavedPrefix] = []  # used last first
    n_left_out: int = 0  # of all three


MAX_TOLD = 256


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message)


def decode(kind: type[M], body: bytes | str) -> M:
    """Parse and check a message.

    Errors: BadRequest with the path of the field that is wrong.
    """
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(str(error)) from error


_reply_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(CompletionReply)
_addressed_decoder = msgspec.json.Decoder(list[Addressed])
_command_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Command)


def decode_reply(line: bytes | str) -> CompletionReply:
    """Errors: BadRequest, as decode."""
    reply: CompletionReply = _checked(_reply_decoder, line)
    return reply


def decode_addressed(line: bytes) -> list[Addressed]:
    """Errors: BadRequest, as decode."""
    return _checked(_addressed_decoder, line)


def decode_command(line: bytes) -> Command:
    """Errors: BadRequest, as decode."""
    command: Command = _checked(_command_decoder, line)
    return command


def _checked(decoder: msgspec.json.Decoder[M], line: bytes | str) -> M:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(str(error)) from error
