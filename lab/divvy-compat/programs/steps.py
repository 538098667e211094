"""Prints what each step returns, a line for each. An error is a result as well."""

import re


def step(name, what):
    try:
        value = what()
        if value is None:
            value = 0
    except BaseException as error:
        value = f"error {type(error).__name__}: {error}"
    text = re.sub(r"0x[0-9a-fA-F]{4,}", "0x…", " ".join(str(value).split()))
    print(name, text[:400] or "(empty)", flush=True)
