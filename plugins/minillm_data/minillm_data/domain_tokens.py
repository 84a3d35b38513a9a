"""Domain tokens: a special token at the beginning of each document that names its domain.

After MeCo (Gao et al. 2025, "Metadata Conditioning Accelerates Language Model Pre-training",
arXiv 2501.01956): the model is conditioned on a document's domain without being trained to predict
it, and trains without it in a cooldown at the end, so that it works without it. MeCo prepends a URL as
text; here each domain has a reserved token, ``<|domain:wiki|>``, after the document's end-of-text id.

The domain is the file's name up to its first dot, the name of its folder, or the value of a key of
the JSON line. ``domains`` lists all domains; a document of any other domain is an error. Evaluation
and generation use unmodified text.

Cost: one token per document; as many tokens are cut at the row's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np

from minillm_core import DataError, Plugin, option
from minillm_core.documents import Continued, Document, Reading, Segment, Source, documents_of
from minillm_data.relaid import Layout, as_it_is, relaid, stretches

__all__ = ["DomainTokens", "domains_of"]


class DomainTokens(Plugin, api=1, unweighted=True):
    """A token before each document that names its domain, until a cooldown."""

    domains: list[str] = option(help="names of all domains", min_length=1)
    by: str = option(
        "folder",
        pattern=r"folder|file|key:.+",
        help="source of the domain's name: folder, file or key:NAME",
    )
    cooldown: float = option(
        0.1, ge=0, lt=1, help="fraction of the run, at its end, without domain tokens"
    )
    add: bool = option(False, help="add the tokens to a given tokenizer that lacks them")

    def build_data(self, data):
        data.source(domains_of, fields={"domain": "int32"}, by=self.by, domains=self.domains)
        for number, domain in enumerate(self.domains, 1):
            data.special(f"domain_{number}", f"<|domain:{domain}|>", add=self.add)
        data.rewrites()

    def on_batch(self, batch, phase, progress, specials):
        if phase != "train" or progress > 1 - self.cooldown:
            return batch
        fields = (batch[name] for name in ("ids", "domain", "documents"))
        rows = [
            [_laid(ids, domain, *ends, specials) for ends in stretches(documents)]
            for ids, domain, documents in zip(*fields, strict=True)
        ]
        return relaid(batch, rows)


def _laid(ids, domain, first, end, specials):
    """Insert a document's domain token after its initial end-of-text id."""
    if ids[first] != specials["end_of_text"] or end - first < 2 or not domain[first + 1]:
        return as_it_is(first, end)
    token = -1 - specials[f"domain_{domain[first + 1]}"]
    take = np.concatenate([[first, token], np.arange(first + 1, end)])
    return Layout(take, np.arange(len(take)) != 1)


def domains_of(
    files: Sequence[Source], reading: Reading, *, by: str, domains: Sequence[str]
) -> Iterator[Iterator[Segment]]:
    """Read documents as segments with the field ``domain``: the domain's number, from 1.

    Args:
        files: files of text, JSON lines or tables.
        reading: bounds, progress and notes.
        by: ``folder``, ``file``, or ``key:NAME`` of a JSON line.
        domains: names of the domains.

    Raises:
        DataError: a domain is not listed, or a file's format cannot name one.
    """
    kind, _, key = by.partition(":")
    for file in files:
        read, records = file.format.read, file.format.records
        if read is None or (kind == "key" and records is None):
            raise DataError(
                f"a {file.format.name} does not name the domain of its documents",
                where=str(file.path),
                fix="give JSON lines with the key" if kind == "key" else "give text or JSON lines",
            )
        if kind == "key":
            assert records is not None
            found = _by_key(records(file.path, file.packing, reading), key, domains, reading)
        else:
            name = file.path.parent.name if kind == "folder" else file.path.name.split(".")[0]
            if name not in domains:
                raise _unlisted(name, domains, str(file.path))
            number = domains.index(name) + 1
            found = ((number, one) for one in read(file.path, file.packing, reading))
        for pieces in _whole(found):
            yield (Segment(piece, {"domain": number}) for number, piece in pieces)


def _whole(found: Iterable[tuple[int, Document]]) -> Iterator[Iterator[tuple[int, Document]]]:
    """Group the pieces in which a long document is read, each read as it is needed."""
    documents = 0

    def document(one: tuple[int, Document]) -> int:
        nonlocal documents
        documents += not isinstance(one[1], Continued)
        return documents

    return (pieces for _, pieces in groupby(found, document))


def _by_key(
    records, key: str, domains: Sequence[str], reading: Reading
) -> Iterator[tuple[int, Document]]:
    for place, line, record in records:
        name = record.get(key)
        if name not in domains:
            error = _unlisted(name, domains, "")
            what = f'"{key}" is {name!r}, not one of the domains'
            reading.malformed(place.error(what, error.fix or "", reason="an unlisted domain"))
            continue
        for document in documents_of([(place, line, record)], reading):
            yield domains.index(name) + 1, document


def _unlisted(name: object, domains: Sequence[str], where: str) -> DataError:
    return DataError(
        f"the domain {name!r} is not listed in domain_tokens.domains",
        where=where,
        fix=f"add it to {', '.join(domains)}; or leave its files out",
    )
