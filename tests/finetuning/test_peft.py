"""LoRA adapters train, save, load and merge; wherever they are put, they are used."""

from __future__ import annotations

import pytest
import torch

from . import work

peft = pytest.importorskip("peft", reason="peft is not installed (the test extra has it)")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it

LAYERS = ["q_proj", "v_proj", "fc1"]


def adapted(targets=LAYERS, **others):
    settings = peft.LoraConfig(task_type=peft.TaskType.SEQ_2_SEQ_LM, r=4, target_modules=list(targets))
    return peft.get_peft_model(work.model(**others), settings)


def logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7, 2]]), decoder_input_ids=torch.tensor([[1, 8, 9]])).logits


def test_trains_saves_loads_and_merges(tmp_path):
    model = adapted()
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = logits(model)
    job = work.trainer(tmp_path, model, work.rows(), batch=2, accumulation=4)
    job.train()
    losses = [entry["loss"] for entry in job.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    after = logits(model)
    assert (after - before).abs().max() > 1e-2
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 20_000
    loaded = peft.PeftModel.from_pretrained(work.model(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), after)
    merged = loaded.merge_and_unload()
    assert type(merged).__name__ == "MetaphraseForConditionalGeneration"
    assert (logits(merged) - after).abs().max() < 1e-5
    generated = merged.generate(torch.tensor([[5, 6, 7, 2]]), max_new_tokens=4)
    assert torch.equal(model.generate(input_ids=torch.tensor([[5, 6, 7, 2]]), max_new_tokens=4), generated)


def test_accumulation_changes_nothing(tmp_path):
    results = []
    for accumulation in (1, 4):
        torch.manual_seed(3)
        model = adapted()
        work.trainer(tmp_path, model, work.rows(), batch=8 // accumulation, accumulation=accumulation).train()
        results.append([p.detach() for p in model.parameters() if p.requires_grad])
    assert max((first - second).abs().max() for first, second in zip(*results, strict=True)) < 1e-6


def test_an_adapter_on_the_output_projection_is_trained():
    """The fast loss reads the projection's matrix alone, and so must stand back."""
    model = adapted(["lm_head"], tie_word_embeddings=False).train()
    batch = {"input_ids": torch.tensor([[5, 6, 2]]), "labels": torch.tensor([[7, 8, 2]])}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    fast, slow = model(**batch, num_items_in_batch=3).loss, model(**batch).loss
    assert abs(fast - slow) < 1e-6
    fast.backward()
    assert all(p.grad.any() for p in model.parameters() if p.requires_grad)
