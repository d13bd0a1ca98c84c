# SPDX-License-Identifier: Apache-2.0
"""Words and prose out of what every installation has."""

import re
from functools import cache

from loadtest.common.texts import documentation
from loadtest.quality.passages import passages

WORD = re.compile(r"[a-z]+")

ADJECTIVES = tuple(
    WORD.findall("""
    able ancient bitter blue bold brave brief bright calm careful cheap clean clever cold cool
    curly damp dark deep dry dusty eager early easy elegant empty fair famous fast fierce flat
    fresh gentle giant glad golden grand green happy heavy hollow honest humble icy jolly keen
    kind large late lazy light little lively lonely long loud lucky mild modern narrow neat
    noble noisy odd old orange pale plain polite proud purple quick quiet rapid rare red rich
    ripe rough round royal rusty salty scarce sharp short shy silent silver simple slow small
    smooth soft solid sour steep strange strong sweet swift tall tame tidy tiny tough vast warm
    weak wild wise young
    """)
)
NOUNS = tuple(
    WORD.findall("""
    anchor apple arrow badge barn basket bell blanket boat book bottle bridge brush bucket
    butter button cabin camel candle canoe carpet castle chair cherry church clock cloud coat
    compass copper corner cotton cradle crown curtain desert diamond door dragon drum eagle
    engine falcon farmer feather fence fiddle field flower forest fountain garden glove grape
    guitar hammer harbor hat helmet honey horse island jacket jungle kettle kitchen ladder lake
    lamp lantern lemon letter lion lizard magnet market meadow melon mirror monkey mountain
    needle ocean olive onion orchard owl paddle paper parrot pearl pencil pepper piano pillow
    pirate planet pocket potato prince puzzle rabbit ribbon river rocket saddle sailor salmon
    shadow shelf ship silk spider spoon station statue stone summer table temple thunder ticket
    tiger tower train tunnel turtle valley violin wagon walnut whale wheel window winter wolf
    """)
)

LETTERS = re.compile(r"\b[a-z]{4,9}\b")


@cache
def words() -> tuple[str, ...]:
    """Some thousand different words of 4 to 9 letters, sorted."""
    return tuple(sorted(set(LETTERS.findall(documentation())) | set(ADJECTIVES) | set(NOUNS)))


@cache
def prose() -> tuple[str, ...]:
    """The words of a book, in order.

    Raises:
        ValueError: the package that ships the book is not installed.
    """
    found = " ".join(text for name, text in passages() if name.startswith("opticks"))
    if not found:
        raise ValueError("no prose to hide needles in: apache-tvm-ffi, which ships it, is missing")
    return tuple(found.split())
