"""Repeated requests in a long conversation: several of them are word for word the same, and one of their replies is to be given again."""

import string

import numpy as np

from longmoe.data.draws import Draws
from longmoe.data.words import ADJECTIVES, NOUNS
from longmoe.evaluation.examples import Draft, Place, TextTask
from longmoe.evaluation.haystack import insert
from longmoe.evaluation.scoring import matched, repetition_score

NEEDLES = (2, 4, 8)
FORMS = ("poem", "letter", "speech", "riddle", "recipe", "diary entry", "news item", "fable", "song", "review")
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_SENTENCES = 4
_VERBS = ("finds", "keeps", "follows", "paints", "sells", "hides", "carries", "forgets", "remembers", "greets", "repairs", "watches")
_SAMPLE = string.ascii_letters + string.digits


def mrcr_tasks() -> list[TextTask]:
    """mrcr_2, _4 and _8: that many turns ask for the same form about the same topic, and the prompt asks for the i-th of their replies behind a prefix
    of ten random characters. Units are the other turns, each with another form or topic.

    Official score: difflib's ratio with the reply, 0 without the prefix; a guess gives the prefix and one of the equal requests' replies. Source: OpenAI's
    MRCR (Vodrahalli et al., 2024, arXiv 2409.12640); replies are sentences of random words.
    """
    return [TextTask(f"mrcr_{needles}", "retrieval", 200, lambda draws, place, needles=needles: _turns(needles, draws, place), repetition_score,
                     least_units=4) for needles in NEEDLES]


def _turns(needles: int, draws: Draws, place: Place) -> Draft:
    """All turns are drawn at once: a conversation of a million tokens has tens of thousands."""
    prefix = draws.text(_SAMPLE, 10)
    which = draws.integer(needles)
    topic, *others = _topics(draws, 1 + place.units)
    form, *other_forms = (FORMS[i] for i in draws.integers(len(FORMS), 1 + place.units).tolist())
    # Every second other turn shares the form or the topic of the asked one, so that neither alone finds it.
    requests = [_request(form, there) if i % 4 == 1 and there != topic else _request(other, topic) if i % 4 == 3 and other != form else _request(other, there)
                for i, (other, there) in enumerate(zip(other_forms, others))]
    asked = _request(form, topic)
    requests = [request if request != asked else _request(next(f for f in FORMS if f != form), topic) for request in requests]
    bodies = _bodies(draws, needles + place.units)
    repeated = bodies[:needles]
    turns = [_turn(*turn) for turn in zip(requests, bodies[needles:])]
    places = np.sort(draws.integers(len(turns) + 1, needles)).tolist()
    conversation = "\n".join(insert(turns, places, [_turn(asked, body) for body in repeated]))
    prompt = (f"Below is a conversation. Afterwards you will be asked to give one of its replies again, word for word.\n{conversation}\n"
              f"User: Write {prefix} and right behind it, without a space, your {_ORDINALS[which]} reply to \"{asked}\", and nothing else.\nAssistant:")
    answer = prefix + repeated[which]
    candidates = tuple(prefix + body for body in repeated)
    chance = sum(matched(answer, candidate, prefix) for candidate in candidates) / needles
    return Draft(prompt, (answer,), candidates, {"prefix": prefix, "needles": needles, "which": which + 1}, chance)


def _topics(draws: Draws, count: int) -> list[str]:
    return [f"{ADJECTIVES[a]} {NOUNS[n]}" for a, n in zip(draws.integers(len(ADJECTIVES), count).tolist(), draws.integers(len(NOUNS), count).tolist())]


def _request(form: str, topic: str) -> str:
    article = "an" if topic[0] in "aeiou" else "a"
    return f"Write a {form} about {article} {topic}."


def _turn(request: str, body: str) -> str:
    return f"User: {request}\nAssistant: {body}"


def _bodies(draws: Draws, count: int) -> list[str]:
    """Replies of four sentences of random words."""
    subjects, objects = _topics(draws, count * _SENTENCES), _topics(draws, count * _SENTENCES)
    verbs = draws.integers(len(_VERBS), count * _SENTENCES).tolist()
    sentences = [f"The {subject} {_VERBS[verb]} the {thing}." for subject, verb, thing in zip(subjects, verbs, objects)]
    return [" ".join(sentences[i:i + _SENTENCES]) for i in range(0, len(sentences), _SENTENCES)]
