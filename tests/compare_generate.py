"""Time per token of the `generate` model beside `generate` of transformers, in one run, and whether texts are equal.

python tests/compare_generate.py model_repository
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from corolla.client import CorollaClient
from corolla.repository.reading import checkpoint_of, dtype_of
from servers import RunningServer

PROMPT = "The session table is"


def main() -> None:
    """Measures in turn, one after the other, and prints medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    folder = checkpoint_of(options.repository)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_of(options.repository).torch)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    ours, theirs, first, equal = [], [], [], True
    with RunningServer(options.repository) as server, CorollaClient(server.grpc) as client:
        for _ in range(options.rounds):
            start = time.perf_counter()
            text, count, began = "", 0, 0.0
            for chunk in client.generate(PROMPT, max_tokens=options.max_tokens):
                began = began or time.perf_counter() - start
                text, count = text + chunk.text, chunk.num_output_tokens or count
            ours.append((time.perf_counter() - start) / count)
            first.append(began)
            start = time.perf_counter()
            with torch.inference_mode():
                output = model.generate(**inputs, max_new_tokens=options.max_tokens, do_sample=False)[0]
            new = output[inputs.input_ids.shape[1] :]
            theirs.append((time.perf_counter() - start) / len(new))
            expected = tokenizer.decode(output, skip_special_tokens=True)[len(PROMPT) :]
            equal = equal and text == expected
    print(
        f"generate through tritonserver: {statistics.median(ours) * 1e3:.2f} ms a token, first text after "
        f"{statistics.median(first) * 1e3:.1f} ms"
    )
    print(f"transformers in this process:  {statistics.median(theirs) * 1e3:.2f} ms a token")
    ratio = statistics.median(theirs) / statistics.median(ours)
    print(f"ratio {ratio:.2f}, texts {'equal' if equal else 'DIFFER'}, {options.rounds} rounds of {count} tokens")


if __name__ == "__main__":
    main()
