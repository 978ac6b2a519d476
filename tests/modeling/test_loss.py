"""The loss: by hand, against torch's own, and the fast path against its slow twin."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from metaphrase.modeling import loss as loss_module
from metaphrase.modeling.loss import cross_entropy_per_token, linear_cross_entropy_per_token
from metaphrase.modeling.modeling_metaphrase import shift_tokens_right

from .tiny import batch, ids, tiny_model, worst

IGNORED = -100


def loop_loss(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> float:
    """- sum_v q_v log p_v, one number at a time, over the labels that count; their mean."""
    losses = []
    for row, label in zip(logits.flatten(0, -2).tolist(), labels.flatten().tolist(), strict=True):
        if label == IGNORED:
            continue
        log_z = math.log(sum(math.exp(x) for x in row))
        q = [smoothing / len(row) + (1 - smoothing) * (v == label) for v in range(len(row))]
        losses.append(-sum(weight * (x - log_z) for weight, x in zip(q, row, strict=True)))
    return sum(losses) / max(1, len(losses))


# LOSS-SMOOTH


def test_LOSS_SMOOTH_a_spread_over_all_classes():
    logits, target = torch.tensor([[2.0, 0, 0, 0]]), torch.tensor([0])
    assert cross_entropy_per_token(logits, target, 0.1).item() == pytest.approx(0.490753, abs=1e-6)
    extra = torch.cat((logits, torch.randn(3, 4)))
    ignored = torch.tensor([0, IGNORED, IGNORED, IGNORED])
    assert torch.equal(cross_entropy_per_token(extra, ignored, 0.1), cross_entropy_per_token(logits, target, 0.1))  # c


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_LOSS_SMOOTH_b_equal_logits(smoothing):
    assert cross_entropy_per_token(torch.zeros(1, 4), torch.tensor([2]), smoothing).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_formula_and_torch(smoothing, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, 5, 11, generator=generator)
    labels = torch.randint(0, 11, (3, 5), generator=generator)
    labels[1, 3:] = labels[2, 1:] = IGNORED
    ours = cross_entropy_per_token(logits, labels, smoothing).item()
    assert ours == pytest.approx(loop_loss(logits, labels, smoothing), rel=1e-5)
    torchs = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
    assert ours == pytest.approx(torchs.item(), rel=1e-6)


# The fast path and its slow twin


def both(rows=(4, 7), width=12, vocab=23, *, ignored="some", smoothing=0.1, items=None, seed=0, dtype=torch.float32):
    """(loss, gradient of the states, gradient of the matrix) of the fast path, and of its slow twin."""
    generator = torch.Generator().manual_seed(seed)
    hidden = (2 * torch.randn(*rows, width, generator=generator)).to(dtype)
    matrix = torch.randn(vocab, width, generator=generator).to(dtype)
    labels = torch.randint(0, vocab, rows, generator=generator)
    if ignored == "some":
        labels[torch.rand(rows, generator=generator) < 0.4] = IGNORED
    elif ignored == "all":
        labels[:] = IGNORED
    results = []
    for fast in (True, False):
        h, w = hidden.clone().requires_grad_(), matrix.clone().requires_grad_()
        if fast:
            value = linear_cross_entropy_per_token(h, w, labels, smoothing, items)
        else:
            value = cross_entropy_per_token(F.linear(h, w), labels, smoothing, items)
        (3 * value).backward()
        results.append((value.detach(), h.grad, w.grad))
    return results


@pytest.fixture(params=[True, False], ids=["on a CPU", "elsewhere"])
def either_way(request, monkeypatch):
    """The normaliser as it is found on a CPU, and as on an accelerator."""
    monkeypatch.setattr(loss_module, "_may_look", lambda tensor: request.param)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("chunk", [1, 3, 28, 1000])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_fast_path_equals_its_slow_twin(chunk, smoothing, ignored, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_ROWS_CPU", chunk)
    for items in (None, 50, torch.tensor(7)):
        fast, slow = both(smoothing=smoothing, ignored=ignored, items=items)
        for ours, theirs in zip(fast, slow, strict=True):
            assert ours.isfinite().all()
            assert worst(ours, theirs) < 1e-6 * max(10, theirs.abs().max())
        if ignored == "all":
            assert all(not tensor.any() for tensor in fast)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("vocab", [1, 2, 1000])
@pytest.mark.parametrize("rows", [(1, 1), (300,), (2, 129)])
def test_fast_path_at_odd_sizes(vocab, rows):
    fast, slow = both(rows=rows, vocab=vocab, width=5)
    for ours, theirs in zip(fast, slow, strict=True):
        assert worst(ours, theirs) < 2e-5


@pytest.mark.usefixtures("either_way")
def test_fast_path_with_logits_far_apart():
    """Scores of hundreds, which overflow an exponential."""
    h = torch.tensor([[100.0, -100.0], [0.0, 60.0]], requires_grad=True)
    w = torch.tensor([[5.0, 0.0], [0.0, 5.0], [-3.0, 2.0]], requires_grad=True)
    labels = torch.tensor([1, 1])
    fast = linear_cross_entropy_per_token(h, w, labels, 0.1)
    grads = torch.autograd.grad(fast, (h, w))
    slow = cross_entropy_per_token(F.linear(h, w), labels, 0.1)
    assert fast.item() == pytest.approx(slow.item(), rel=1e-6)
    for ours, theirs in zip(grads, torch.autograd.grad(slow, (h, w)), strict=True):
        assert worst(ours, theirs) < 1e-4


@pytest.mark.usefixtures("either_way")
def test_fast_path_where_some_targets_have_no_chance():
    """Rows so sure of another word that the target's probability is no float32 number, beside rows that are not."""
    torch.manual_seed(0)
    h = torch.randn(9, 4) * torch.tensor([1.0, 300.0, 2.0, 80.0, 1.0, 40.0, 500.0, 0.1, 20.0])[:, None]
    w, labels = torch.randn(11, 4), torch.randint(0, 11, (9,))
    labels[4] = IGNORED
    p_target = F.linear(h, w).softmax(-1).gather(1, labels.clamp(min=0).unsqueeze(1))
    assert (p_target == 0).any() and ((p_target > 0) & (p_target < 1e-30)).any() and (p_target > 0.1).any()
    results = []
    for function in (lambda h, w: linear_cross_entropy_per_token(h, w, labels, 0.1),
                     lambda h, w: cross_entropy_per_token(F.linear(h, w), labels, 0.1)):  # fmt: skip
        leaves = h.clone().requires_grad_(), w.clone().requires_grad_()
        value = function(*leaves)
        results.append((value, *torch.autograd.grad(value, leaves)))
    for ours, theirs in zip(*results, strict=True):
        assert worst(ours, theirs) < 1e-6 * theirs.abs().max()


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fast_path_in_half_precision(dtype):
    fast, slow = both(dtype=dtype)
    exact = both()[1]
    for ours, twin, right in zip(fast, slow, exact, strict=True):
        assert ours.dtype == twin.dtype and ours.isfinite().all()
        assert worst(ours, right) < 2 * worst(twin, right) + 0.02  # no worse than the twin, against float32


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fast_path_under_autocast(dtype):
    with torch.autocast("cpu", dtype=dtype):
        fast, slow = both()
    exact = both()[1]
    for ours, twin, right in zip(fast, slow, exact, strict=True):
        assert ours.dtype == twin.dtype == torch.float32
        assert worst(ours, right) < 2 * worst(twin, right) + 0.02


def test_a_label_outside_the_vocabulary_is_an_error_on_both_paths():
    h, w = torch.randn(2, 4), torch.randn(5, 4)
    for labels in (torch.tensor([1, 5]), torch.tensor([-1, 1])):
        with pytest.raises((IndexError, RuntimeError)):
            cross_entropy_per_token(F.linear(h, w), labels)
        with pytest.raises((IndexError, RuntimeError)):
            linear_cross_entropy_per_token(h, w, labels)


def test_a_second_derivative_of_the_fast_path_is_refused():
    h, w = torch.randn(2, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    grad = torch.autograd.grad(linear_cross_entropy_per_token(h, w, torch.tensor([1, 2])), h, create_graph=True)[0]
    with pytest.raises(RuntimeError):
        grad.sum().backward()


def test_fast_path_learns_only_what_wants_to_learn():
    labels = torch.tensor([1, 2])
    for learns_h, learns_w in ((True, False), (False, True), (False, False)):
        h = torch.randn(2, 4, requires_grad=learns_h)
        w = torch.randn(5, 4, requires_grad=learns_w)
        value = linear_cross_entropy_per_token(h, w, labels)
        assert value.item() == pytest.approx(F.cross_entropy(F.linear(h, w), labels).item(), rel=1e-5)
        if learns_h or learns_w:
            value.backward()
        assert (h.grad is not None) is learns_h and (w.grad is not None) is learns_w


# Through the model


def test_LOSS_SHIFT():
    """pad 0, start 1, eos 2."""
    labels = torch.tensor([[5, 6, 2, -100, -100], [7, 8, 9, 10, 2]])
    kept = labels.clone()
    assert shift_tokens_right(labels, 0, 1).tolist() == [[1, 5, 6, 2, 0], [1, 7, 8, 9, 10]]
    model = tiny_model()
    source = ids([4, 6])
    output = model(input_ids=source, labels=labels)
    assert torch.equal(labels, kept)
    plain = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    assert abs(output.loss - plain) < 1e-6
    given = model(input_ids=source, decoder_input_ids=torch.tensor([[1, 5, 6, 2, 0], [1, 7, 8, 9, 10]]))
    assert torch.equal(output.logits, given.logits)


@pytest.mark.parametrize("field", ["decoder_start_token_id", "pad_token_id"])
def test_LOSS_SHIFT_without_a_token(field):
    model = tiny_model()
    setattr(model.config, field, None)
    with pytest.raises(ValueError, match=field):
        model(input_ids=ids([3]), labels=ids([3]))


def micro_batches(model):
    """Two: one target token, and three; and both in one batch."""
    source = ids([5, 5])
    labels = torch.tensor([[7, -100, -100], [9, 4, 2]])
    one = {"input_ids": source[:1], "labels": labels[:1]}
    three = {"input_ids": source[1:], "labels": labels[1:]}
    return one, three, {"input_ids": source, "labels": labels}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_LOSS_GA(training, smoothing):
    """With the update's token count, micro-batches add up to the whole batch, in loss and gradient."""
    model = tiny_model(label_smoothing=smoothing).train(training)
    one, three, whole = micro_batches(model)
    parts = [model(**part, num_items_in_batch=4).loss for part in (one, three)]
    assert worst(sum(parts), model(**whole).loss) < 1e-6
    assert worst(sum(parts), model(**whole, num_items_in_batch=torch.tensor(4)).loss) < 1e-6
    means = [model(**part).loss for part in (one, three)]
    assert worst(sum(parts), (means[0] + 3 * means[1]) / 4) < 1e-6
    assert abs(means[0] - means[1]) > 0.05  # so that a mean of means would be seen
    sum(parts).backward()
    parts_grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(**whole).loss.backward()
    assert max(worst(parts_grads[name], p.grad) for name, p in model.named_parameters()) < 1e-6


def test_LOSS_GA_numbers_of_the_case():
    """Losses 4.0 for one token and 1.0 for three: 7/4, not 2.5, 3.5 or 5."""
    logits = torch.zeros(4, 2)  # two classes; the gap that gives the wanted loss
    for row, wanted in enumerate((4.0, 1.0, 1.0, 1.0)):
        logits[row, 1] = math.log(math.exp(wanted) - 1)
    labels = torch.zeros(4, dtype=torch.long)
    parts = [cross_entropy_per_token(logits[rows], labels[rows], 0.0, 4) for rows in (slice(0, 1), slice(1, 4))]
    assert sum(parts).item() == pytest.approx(1.75)
    assert cross_entropy_per_token(logits, labels).item() == pytest.approx(1.75)


@pytest.mark.parametrize("items", [None, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_LOSS_ALLIGN(items, smoothing):
    """Nothing to learn: loss 0, gradients 0, and weights unharmed by a step; as a part of an update it adds nothing."""
    model = tiny_model(label_smoothing=smoothing).train()
    nothing = {"input_ids": ids([4, 3]), "labels": torch.full((2, 3), -100)}
    output = model(**nothing, num_items_in_batch=items)
    assert output.loss.item() == 0.0
    output.loss.backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for name, p in model.named_parameters():
        assert p.grad is None or not p.grad.any()
        assert torch.equal(p, before[name])


def test_smoothing_acts_in_training_only_and_the_fast_path_gives_the_same():
    model = tiny_model(label_smoothing=0.1)
    inputs = {"input_ids": ids([5, 5]), "labels": torch.tensor([[7, -100, -100], [9, 4, 2]])}
    evaluation = model(**inputs)
    assert worst(evaluation.loss, F.cross_entropy(evaluation.logits.flatten(0, 1), inputs["labels"].flatten())) < 1e-6
    model.train()
    slow, fast = model(**inputs), model(**inputs, num_items_in_batch=4)
    assert slow.logits is not None and fast.logits is None
    assert worst(slow.loss, fast.loss) < 1e-6 and abs(slow.loss - evaluation.loss) > 1e-3
    assert slow.loss.item() == pytest.approx(loop_loss(slow.logits, inputs["labels"], 0.1), rel=1e-5)


def test_a_changed_output_projection_is_not_passed_over():
    """An adapter or a quantized layer in the head's place computes more than a product with its matrix."""

    class Doubled(torch.nn.Linear):
        def forward(self, states):
            return 2 * super().forward(states)

    model = tiny_model(tie_word_embeddings=False).train()
    head = Doubled(24, 40, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    inputs = {"input_ids": ids([5, 5]), "labels": torch.tensor([[7, -100, -100], [9, 4, 2]])}
    assert worst(model(**inputs, num_items_in_batch=4).loss, model(**inputs).loss) < 1e-6


def test_logits_to_keep():
    model = tiny_model()
    inputs = batch()
    whole = model(**inputs).logits
    assert worst(model(**inputs, logits_to_keep=2).logits, whole[:, -2:]) < 1e-6
