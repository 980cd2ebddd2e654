"""GPT-2 124M through Transformers' Trainer with the flags that its documentation recommends: trainer_flags.py.

With --graphs the compiler's "reduce-overhead", too.
"""

import ahead  # noqa: F401  (it finds the naive scripts)
import gpt2_trainer as naive
import trainer_flags

if __name__ == "__main__":
    naive.main(**trainer_flags.flags())
