"""Small random models of sentence-transformers, one of each kind, for tests of packing them and of `weft embed`."""

from collections import OrderedDict

import torch
from embed_folders import WIDTH, folder, tokenizer

PAIRS = [
    ("a", "The Fox"), ("the fox", "b"), ("x" * 9, "Hello World " * 3), ("long " * 9, "é ß"), ("q", "long " * 6),
    ("", "a"),
]  # fmt: skip
KINDS = {"device": "cpu", "local_files_only": True}


def words(**options):
    return tokenizer(mask_token="[SEP]", **options)


def transformer(path, family="Bert", head="Model", task="feature-extraction", *, seed=0, side="right", **options):
    from sentence_transformers.base.modules import Transformer

    folder(path, family, head=head, plain=True, seed=seed, words=words(padding_side=side))
    made = Transformer(str(path), transformer_task=task, model_kwargs={"local_files_only": True}, **options)
    return made.eval()


def random(module, seed):
    """Weights that are no identities, so that a module that is left out is seen."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return module


def dense(outputs=24, name="sentence_embedding", *, width=WIDTH, **options):
    from sentence_transformers.base.modules import Dense

    return random(Dense(width, outputs, module_input_name=name, **options), outputs)


def embedder(path, family="Bert", *, pooling="mean", side="right", extra=(), **options):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    modules = [transformer(path, family, side=side), Pooling(WIDTH, pooling), *extra, dense(), Normalize()]
    prompts = {"query": "Query it ", "document": "Text "}
    return SentenceTransformer(modules=modules, prompts=prompts, device="cpu", **options)


def asymmetric(path, *, task="document"):
    """Queries by a table of tokens, documents by a transformer; two routes share the latter."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding

    first = transformer(path)
    static = random(StaticEmbedding(words().backend_tokenizer, embedding_dim=WIDTH), 5)
    routes = {"query": [static], "document": [first, Pooling(WIDTH, "cls")], "other": [first, Pooling(WIDTH, "max")]}
    return SentenceTransformer(modules=[Router(routes, default_route=task)], device="cpu")


def reranker(path, family="Bert", *, labels=1):
    """A CrossEncoder with a head for classification."""
    from sentence_transformers import CrossEncoder

    folder(path, family, head="ForSequenceClassification", plain=True, words=words(), num_labels=labels)
    return CrossEncoder(str(path), **KINDS)


def yes_no(path, family="Llama"):
    """A CrossEncoder that reads two logits of a language model."""
    from sentence_transformers import CrossEncoder
    from sentence_transformers.cross_encoder.modules import LogitScore

    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    modules = [transformer(path, family, head, "text-generation"), LogitScore(10, 20)]
    return CrossEncoder(modules=modules, device="cpu")


def splade(path, family="Bert", *, strategy="max"):
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import SpladePooling

    return SparseEncoder(
        modules=[transformer(path, family, "ForMaskedLM", "fill-mask"), SpladePooling(strategy)], device="cpu"
    )


def inference_free(path):
    """A SparseEncoder whose queries need no transformer."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    documents = [transformer(path, head="ForMaskedLM", task="fill-mask"), SpladePooling("max", "log1p_relu")]
    queries = random(SparseStaticEmbedding(words()), 7)
    return SparseEncoder(modules=[Router.for_query_document([queries], documents)], device="cpu")


def sparse_codes(path):
    """A SparseEncoder on a dense embedding."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sentence_transformer.modules import Pooling
    from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

    codes = random(SparseAutoEncoder(WIDTH, 128, k=9, k_aux=16), 3)
    return SparseEncoder(modules=[transformer(path), Pooling(WIDTH), codes], device="cpu")


def late(path, family="Bert", *, expansion=None, skip=("a", "b")):
    """A MultiVectorEncoder: a vector for each token."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    name = "token_embeddings"
    modules = OrderedDict(
        transformer=transformer(path, family, query_expansion=expansion),
        dense=dense(16, name, bias=False, activation_function=torch.nn.Identity()),
        normalize=Normalize(module_input_name=name), mask=MultiVectorMask(skiplist_words=list(skip)),
    )  # fmt: skip
    return MultiVectorEncoder(modules=modules, device="cpu")
