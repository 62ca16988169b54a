"""Other people's tools on packed models: what copies, saves, trains, compiles, traces, counts and transforms them."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

import packed_models as small  # noqa: E402

from weft.errors import Unsupported  # noqa: E402
from weft.packed import PackedBatch, pack, packed_attention  # noqa: E402
from weft.transformer import training  # noqa: E402

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
IDS, MASK = small.inputs([9, 2, 6])


def first(model, **options):
    output = model(IDS, attention_mask=MASK, **options)
    return output.logits if "logits" in output else output.last_hidden_state


class Caller(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, ids, mask):
        return self.model(ids, attention_mask=mask).last_hidden_state


# ---- copies and files


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved, "deepcopy": copy.deepcopy, "copy": copy.copy
}  # fmt: skip


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize(("family", "head"), [("Bert", "Model"), ("Roberta", "ForMaskedLM"), ("Llama", "ForCausalLM")])
def test_copies_are_equal_and_on_their_own(family, head, way):
    packed = pack(small.build(family, head), attention_dropout="off")
    with torch.no_grad():
        want = first(packed)  # an engine is at work, which is not copied
        twin = COPIES[way](packed)
        assert type(twin) is type(packed)
        assert torch.equal(first(twin), want)
        if way == "copy":
            return
        packed.get_input_embeddings().weight.zero_()
        assert torch.equal(first(twin), want)
        for p in twin.parameters():
            p.mul_(0.9)
        assert not torch.equal(first(twin), want)
    assert [p.shape for p in twin.parameters()] == [p.shape for p in packed.parameters()]


def test_a_shallow_copy_looks_at_the_model_that_was_packed():
    model = small.build("Llama")
    twin = copy.copy(pack(model))
    with torch.no_grad():
        first(twin)
        model.layers = model.layers[:-1]
        with pytest.raises(Unsupported, match="have been replaced since"):
            first(twin)
    assert first(copy.deepcopy(pack(model))).isfinite().all()


def test_another_process_gets_the_same_bits(tmp_path):
    packed = pack(small.build("Llama", "ForCausalLM"))
    with torch.no_grad():
        torch.save((packed, IDS, MASK, first(packed)), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, ids, mask, want = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.no_grad():\n"
        "    assert torch.equal(model(ids, attention_mask=mask).logits, want)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], timeout=300, check=False)
    assert done.returncode == 0


def test_a_torch_encoder_is_copied_too():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2).eval()
    packed, src = pack(encoder), torch.randn(2, 5, 32)
    with torch.no_grad():
        want = packed(src)
        for way in COPIES.values():
            assert torch.equal(way(packed)(src), want)


@pytest.mark.parametrize(("family", "head"), [("Bert", "ForSequenceClassification"), ("GPT2", "LMHeadModel")])
def test_saved_and_loaded_by_hugging_face(family, head, tmp_path):
    packed = pack(small.build(family, head))
    packed.save_pretrained(tmp_path)
    loaded = getattr(transformers, family + head).from_pretrained(tmp_path)
    with torch.no_grad():
        real = MASK.bool() if head == "LMHeadModel" else slice(None)
        torch.testing.assert_close(first(loaded)[real], first(packed)[real], **CLOSE)
        assert torch.equal(first(pack(loaded)), first(packed))
    assert transformers.AutoConfig.from_pretrained(tmp_path).architectures == [family + head]
    made = type(packed).from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was made by the class of a packed model, and is not packed"):
        first(made)


# ---- training


def dataset(kind):
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(5, small.VOCABULARY, (n,), generator=generator).tolist() for n in (4, 15, 7, 19, 3, 8)]
    labels = {"row": lambda i, t: i % 2, "lm": lambda i, t: t}[kind]
    return [{"input_ids": t, "labels": labels(i, t)} for i, t in enumerate(texts)]


def collate(items):
    longest = max(len(item["input_ids"]) for item in items)

    def padded(values, fill):
        return values if isinstance(values, int) else values + [fill] * (longest - len(values))

    return {
        "input_ids": torch.tensor([padded(item["input_ids"], small.PAD) for item in items]),
        "attention_mask": torch.tensor([padded([1] * len(item["input_ids"]), 0) for item in items]),
        "labels": torch.tensor([padded(item["labels"], -100) for item in items]),
    }


@pytest.mark.parametrize(
    ("family", "head", "kind", "options"),
    [
        ("Bert", "ForSequenceClassification", "row", {}),
        ("GPT2", "LMHeadModel", "lm", {"gradient_accumulation_steps": 2}),
        ("Llama", "ForCausalLM", "lm", {"gradient_checkpointing": True}),
    ],
)
def test_hugging_faces_trainer(family, head, kind, options, tmp_path):
    losses = []
    for packs in (False, True):
        model = small.build(family, head)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0  # no two draw the same
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
            learning_rate=1e-2, save_strategy="no", disable_tqdm=True, seed=3, **options,
        )  # fmt: skip
        trainer = transformers.Trainer(
            pack(model) if packs else model, arguments, train_dataset=dataset(kind), data_collator=collate
        )
        trainer.train()
        losses.append([step["loss"] for step in trainer.state.log_history if "loss" in step])
    assert len(losses[0]) == 4
    assert losses[0][0] != losses[0][-1]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_gradient_checkpointing_recomputes_layers(family, monkeypatch):
    model = small.build(family).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    packed = pack(model)
    calls, grads = [], []
    own = training._layer
    monkeypatch.setattr(training, "_layer", lambda *a: calls.append(1) or own(*a))
    for enable in (False, True):
        if enable:
            packed.gradient_checkpointing_enable()
        model.zero_grad()
        calls.clear()
        first(packed, output_hidden_states=True).square().sum().backward()
        grads.append({n: p.grad.clone() for n, p in packed.named_parameters() if p.grad is not None})
        layers = 4 if family == "ModernBert" else 3
        assert len(calls) == layers * (2 if enable else 1)
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad), name
    packed.gradient_checkpointing_disable()
    first(packed)


def test_a_whole_call_recomputed():
    """With dropout, which must be drawn again alike."""
    packed = pack(small.build("Bert")).train()
    grads = []
    for recomputes in (False, True):
        packed.zero_grad()
        torch.manual_seed(5)
        start = torch.zeros((), requires_grad=True)
        call = lambda _: first(packed).square().sum()  # noqa: E731
        (checkpoint(call, start, use_reentrant=False) if recomputes else call(start)).backward()
        grads.append({n: p.grad.clone() for n, p in packed.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-4, rtol=1e-4)


# ---- compilers, tracers, counters, transformations


def test_tracing_and_exporting_are_refused_by_name():
    caller = Caller(pack(small.build("Bert")))
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"torch\.jit\.trace, and ONNX by it: a packed model looks at the mask"):
            torch.jit.trace(caller, (IDS, MASK), check_trace=False)
        with pytest.raises(ValueError, match=r"torch\.export, and ONNX by it"):
            torch.export.export(caller, (IDS, MASK))
        with pytest.raises(ValueError, match=r"torch\.jit\.trace, and ONNX by it"):
            torch.onnx.export(caller, (IDS, MASK), io.BytesIO(), dynamo=False)
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="FakeTensorMode: a packed"):
            caller(IDS, MASK)


def test_transformations_are_refused_by_name():
    model = small.build("Bert")
    packed = pack(model)
    parameters = {n: p.detach() for n, p in packed.named_parameters()}

    def loss(given):
        return torch.func.functional_call(packed, given, (IDS, MASK)).last_hidden_state.sum()

    with pytest.raises(ValueError, match=r"torch\.func \(vmap, grad, jvp\): a packed model"):
        torch.vmap(lambda ids: packed(ids[None]).last_hidden_state)(IDS)
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(loss)(parameters)
    with torch.no_grad():
        torch.testing.assert_close(first(packed), first(model) * MASK[..., None], **CLOSE)


def test_functional_call():
    model = small.build("Bert", "ForMaskedLM")
    packed = pack(model)
    with torch.no_grad():
        before = first(packed)
        halves = {n: p * 0.5 for n, p in packed.named_parameters()}
        got, want = (torch.func.functional_call(m, halves, (IDS, MASK)).logits for m in (packed, model))
        torch.testing.assert_close(got, want * MASK[..., None], **CLOSE)
        assert torch.equal(first(packed), before)


def test_compiled_code_calls_it():
    packed = pack(small.build("Bert"))
    with torch.no_grad():
        want = first(packed)
        assert torch.equal(torch.compile(Caller(packed), backend="eager")(IDS, MASK), want)
        assert torch.equal(first(torch.compile(packed, backend="eager")), want)
    loss = torch.compile(lambda: first(packed).square().sum(), backend="eager")()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in packed.parameters())


def test_autocast_computes_in_the_type_of_the_weights():
    model = small.build("Bert", "ForMaskedLM")
    packed = pack(model)
    want = first(model) * MASK[..., None]
    for grad in (False, True):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
            got, hidden = first(packed), packed.bert(IDS, attention_mask=MASK).last_hidden_state
        assert got.dtype == torch.bfloat16  # the head is the model's own code
        assert hidden.dtype == torch.float32
        torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0.05)
    got.float().sum().backward()


def test_a_dispatch_mode_sees_what_is_computed():
    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(str(function))
            return function(*args, **(kwargs or {}))

    packed = pack(small.build("Bert"))
    with torch.no_grad():
        want = first(packed)
        with Seen() as seen:
            got = first(packed)
    torch.testing.assert_close(got, want, **CLOSE)
    assert {"weft.linear.default", "weft.self_attention.default"} <= seen.names


def test_counting_flops():
    batch = PackedBatch.from_list([torch.zeros(n) for n in (3, 5)])
    q = torch.randn(8, 4, 16, requires_grad=True)
    kv = torch.randn(8, 2, 16)
    with FlopCounterMode(display=False) as counter:
        out = packed_attention(q, kv, kv, batch)
    forward = 2 * 2 * (3 * 3 + 5 * 5) * 4 * 16
    assert counter.get_total_flops() == forward
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 5 * forward // 2
    with pytest.raises(ValueError, match="or by a tool such as FlopCounterMode"), FlopCounterMode(display=False):
        first(pack(small.build("Bert")))


def test_vmap_of_attention():
    batch = PackedBatch.from_list([torch.zeros(n) for n in (3, 5)])
    q = torch.randn(2, 8, 4, 16)
    with torch.no_grad():
        got = torch.vmap(lambda t: packed_attention(t, t, t, batch, causal=True))(q)
        want = torch.stack([packed_attention(t, t, t, batch, causal=True) for t in q])
    torch.testing.assert_close(got, want)
