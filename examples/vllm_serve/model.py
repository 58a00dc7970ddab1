"""Writes a small random Qwen3 with its tokenizer into a directory: python model.py DIRECTORY"""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
    initializer_range=0.25, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
words = ["<pad>", "<bos>", "<eos>", "<unk>"] + [f"w{i}" for i in range(4, 512)]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
).save_pretrained(sys.argv[1])
