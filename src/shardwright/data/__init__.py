"""Text to tokens to rows to batches. A row is a function of (seed, global row index), never of the mesh.

documents.py  sources of text
tokens.py     text to token ids
corpus.py     a tokenised source
packing.py    documents packed into rows, and the fields of a row
batches.py    which rows a step reads, in which order

``read_corpus`` reads and tokenises a source once, ``Rows`` packs the corpus into rows, ``Batches`` shuffles and reads them.
"""

from shardwright.data.batches import Batch, Batches
from shardwright.data.corpus import Corpus, read_corpus
from shardwright.data.documents import Document, documents
from shardwright.data.packing import ROW_FIELDS, Row, Rows
from shardwright.data.tokens import ByteTokenizer, FileTokenizer, Tokenizer, read_tokenizer

__all__ = [
    "ROW_FIELDS",
    "Batch",
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "FileTokenizer",
    "Row",
    "Rows",
    "Tokenizer",
    "documents",
    "read_corpus",
    "read_tokenizer",
]
