"""What an image may be, and what reading it may cost; the words between who asks and the process that reads."""

from __future__ import annotations

import struct

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")  # as Pillow calls them

MAX_FILE_BYTES = 100 << 20
MAX_PIXELS = 64 << 20  # more than cameras of telephones have in all but their largest mode
MIN_SIDE = 2
MAX_SIDE = 1 << 15  # panoramas and pages of a screen are shorter; on its way to its size an image is once as wide as that is
# A picture of one colour has some hundreds of pixels in a byte of its file; what has more is made to fill memory. Small ones may.
MAX_PIXELS_PER_BYTE, ALWAYS_ALLOWED_PIXELS = 2_000, 4 << 20

MAX_PROCESS_BYTES = 3 << 30  # of addresses: the largest image several times over, and the interpreter
LIMIT_S = 10.0  # of a processor's time, for one image
PATIENCE = 6  # so many times that on the clock, on a machine that is busy with other things

REQUEST = struct.Struct(">I")  # the bytes that follow
REPLY = struct.Struct(">BII")  # what follows: PIXELS of width and height, or a PROBLEM of so many bytes
READY, PIXELS, PROBLEM = range(3)
