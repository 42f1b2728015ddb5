"""generate() of a tiny language model, greedy, sampled and with a mask of -Inf."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, pad_token_id=0,
        num_attention_heads=2, num_key_value_heads=2, bos_token_id=1, eos_token_id=2,
    )
).eval()  # fmt: skip


def ban(ids, scores):
    return scores.index_fill(-1, torch.tensor([3, 4]), float("-inf"))


given = torch.tensor([[1, 5, 6]])
print(model.generate(given, max_new_tokens=5, do_sample=False).tolist())
print(model.generate(given, max_new_tokens=5, do_sample=True).tolist())
print(model.generate(given, max_new_tokens=5, logits_processor=LogitsProcessorList([ban])).tolist())
found = model(given, output_hidden_states=True)
print([x.sum().item() for x in found.hidden_states], found.logits.sum().item())
