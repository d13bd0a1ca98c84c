# SPDX-License-Identifier: Apache-2.0
"""Questions about given documents: one of them says the answer, or one says where another says it.

After ``qa.py`` of NVIDIA/RULER, whose documents and questions are those of SQuAD and HotpotQA. Ours are lives
of people who never lived, so that no model has read of them.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Literal

from loadtest.quality.ruler.example import Example
from loadtest.quality.ruler.source import ADJECTIVES, NOUNS


def _words(text: str) -> list[str]:
    return text.split()


FIRST = _words("""
    Abel Agnes Alma Anton Bela Bruno Clara Cora Dora Edda Elias Emil Enid Fanny Felix Flora Gerda
    Gustav Hanna Hugo Ida Ilse Jakob Jonas Karl Kora Lena Ludo Mara Milo Nell Nora Oskar Otto Paula
    Rosa Ruben Selma Theo Vera
    """)
LAST = (
    _words("Al Bar Bren Cor Dahl Eck Fen Gar Hol Ker Lan Mor Nor Pell Quen Ros Sel Thor Vand Wes"),
    _words(
        "berg bury da den der dorf feld gren heim ins kamp ler man mark nik quist sen ster wick"
    ),
)
TOWN = (
    _words("Ald Bram Brev Cald Drom Elm Fald Grim Harl Ist Kest Lind Marn Nord Oden Pred Rav Tolv"),
    _words("bach bo by dal field ford gard haven ik mouth sund vik"),
)
TRADES = (
    "bell founder", "bookbinder", "cabinet maker", "carpet weaver", "clockmaker", "copper engraver",
    "glass painter", "harp maker", "lens grinder", "map engraver", "organ builder", "puppet maker",
    "sail maker", "silversmith", "stone carver", "tile painter",
)  # fmt: skip

LIVES = (
    "{name} ({born} to {died}) was a {trade}. {last} came from {home}, learned the trade from "
    "{teacher} in {school}, and is remembered for The {work}, finished in {finished}.",
    "Born at {home} in {born}, {name} became a {trade} after some years in {school}, where {teacher} "
    "was the teacher. The {work}, completed in {finished}, is the best known work. {last} died in {died}.",
    "The {work} of {finished} made the {trade} {name} famous. It was {teacher} who had been the teacher "
    "of {last}, in the town of {school}; the place of birth, in {born}, was {home}. {last} died in {died}.",
)

ASKED = {
    "home": "In which town was {name} born?",
    "school": "In which town did {name} learn the trade?",
    "work": "What is the best known work of {name}?",
    "finished": "In which year did {name} finish the best known work?",
}
ASKED_OF_TEACHER = {
    "home": "In which town was the teacher of {name} born?",
    "school": "In which town did the teacher of {name} learn the trade?",
    "work": "What is the best known work of the teacher of {name}?",
}

TOLD = (
    "Answer the question based on the given documents. Only give me the answer and do not output "
    "any other words."
)
ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Questions:
    """The tasks ``qa_1`` and ``qa_2``.

    Attributes:
        hops: documents that are needed to know the answer.
    """

    hops: Literal[1, 2]
    least = 3
    """Documents."""

    def build(self, source: random.Random, size: int) -> Example:
        """An example with so many documents.

        Raises:
            ValueError: there are not so many names.
        """
        people = _people(source, size)
        place = source.randrange(1, size)
        asked = people[place]
        about, ways = (asked, ASKED) if self.hops == 1 else (asked.teacher, ASKED_OF_TEACHER)
        assert about is not None
        what = source.choice(sorted(ways))
        texts = [person.text for person in people]
        source.shuffle(texts)
        documents = "\n\n".join(f"Document {n}:\n{text}" for n, text in enumerate(texts, 1))
        return Example(
            f"{TOLD}\n\nThe following are given documents.\n\n{documents}\n\n",
            f"{TOLD}\n\nQuestion: {ways[what].format(name=asked.facts['name'])}",
            " Answer:",
            (about.facts[what],),
            ANSWER_TOKENS,
        )


@dataclass(frozen=True)
class _Person:
    """``teacher``: ``None`` where no document tells of them."""

    facts: dict[str, str]
    teacher: _Person | None
    text: str


def _people(source: random.Random, count: int) -> list[_Person]:
    """Older ones first; each but the first was taught by one of the five before."""
    names = [f"{one} {a}{b}" for one, a, b in itertools.product(FIRST, *LAST)]
    works = [
        f"{adjective.title()} {noun.title()}"
        for adjective, noun in itertools.product(ADJECTIVES, NOUNS)
    ]
    if count >= len(names):
        raise ValueError(f"length: {count} documents are more than our {len(names)} names")
    towns = ["".join(parts) for parts in itertools.product(*TOWN)]
    stranger, *names = source.sample(names, count + 1)
    people: list[_Person] = []
    for number, (name, work) in enumerate(zip(names, source.sample(works, count), strict=True)):
        teacher = people[source.randrange(max(0, number - 5), number)] if people else None
        born = 1700 + number + source.randrange(5)
        # A pupil's document must not happen to say what only the teacher's should.
        elsewhere = teacher.facts.values() if teacher else ()
        home, school = source.sample([town for town in towns if town not in elsewhere], 2)
        facts = {
            "name": name,
            "last": name.split()[1],
            "trade": source.choice(TRADES),
            "home": home,
            "school": school,
            "teacher": teacher.facts["name"] if teacher else stranger,
            "work": work,
            "born": str(born),
            "finished": str(born + source.randrange(25, 45)),
            "died": str(born + source.randrange(50, 80)),
        }
        people.append(_Person(facts, teacher, source.choice(LIVES).format(**facts)))
    return people
