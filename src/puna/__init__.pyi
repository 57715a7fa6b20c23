from puna.local.answers import Answer as Answer
from puna.local.answers import Chunk as Chunk
from puna.local.answers import Logprob as Logprob
from puna.local.answers import Ranked as Ranked
from puna.local.answers import ToolCall as ToolCall
from puna.local.asynchronous import AsyncEngine as AsyncEngine
from puna.local.engine import Engine as Engine

__all__: list[str]
__version__: str
