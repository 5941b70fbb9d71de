"""MSL text to C++: two rewrites, and the entry point that the runtime calls.

The rest is macros (see shim/msl_types.h). Lines keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from metalsim.signature import Buffer, Signature

_COMMENT = r"//[^\n]*|/\*.*?\*/"
_TOKEN = re.compile(_COMMENT + r'|#[^\n]*|"(?:\\.|[^"\\])*"|[A-Za-z_]\w*|\s+|.', re.DOTALL)
# Clang does not take attributes in an explicit instantiation; the entry point names the instance.
_INSTANCE = re.compile(r"^template \[\[host_name[^\n]*;$", re.MULTILINE)

_TRIPLES = {
    "dispatch_threads_per_threadgroup": "full_group_size",
    "grid_size": "grid_size",
    "thread_position_in_grid": "position_in_grid",
    "thread_position_in_threadgroup": "position_in_group",
    "threadgroup_position_in_grid": "group_in_grid",
    "threadgroups_per_grid": "groups",
    "threads_per_grid": "grid_size",
    "threads_per_threadgroup": "group_size",
}
_PRODUCT = "p->{0}[0] * p->{0}[1] * p->{0}[2]"
_ATTRIBUTES = {
    **{a: f"uint3(p->{f}[0], p->{f}[1], p->{f}[2])" for a, f in _TRIPLES.items()},
    "grid_origin": "uint3(0)",
    "dispatch_quadgroups_per_threadgroup": f"({_PRODUCT.format('full_group_size')} + 3) / 4",
    "dispatch_simdgroups_per_threadgroup": "p->full_simdgroups",
    "quadgroup_index_in_threadgroup": "p->index_in_group / 4",
    "quadgroups_per_threadgroup": f"({_PRODUCT.format('group_size')} + 3) / 4",
    "simdgroup_index_in_threadgroup": "p->simdgroup",
    "simdgroups_per_threadgroup": "p->simdgroups",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "p->index_in_group % 4",
    "thread_index_in_simdgroup": "p->lane",
    "thread_index_in_threadgroup": "p->index_in_group",
    "threads_per_simdgroup": "32u",
}


def _statement_end(tokens: list[str], at: int) -> int:
    """Index of the `;` that ends the statement at `at`, or of what ends it before that."""
    depth = 0
    while at < len(tokens) and depth >= 0 and (depth > 0 or tokens[at] != ";"):
        depth += (tokens[at] in "([{") - (tokens[at] in ")]}") if len(tokens[at]) == 1 else 0
        at += 1
    return at


def _declarators(declaration: str) -> Iterator[str]:
    """The parts of a declaration between its outer commas."""
    depth, angles, start = 0, 0, 0
    for at, character in enumerate(declaration):
        depth += (character in "([") - (character in ")]")
        if depth == 0:  # within an array's length `<` compares
            angles += (character == "<") - (character == ">")
        if character == "," and depth == angles == 0:
            yield declaration[start:at]
            start = at + 1
    yield declaration[start:]


def _variables(declaration: str, first: int) -> str:
    """`float a[8], b` as references to threadgroup memory, numbered from `first`."""
    lines = declaration.count("\n")
    declaration = re.sub(_COMMENT, "", declaration, flags=re.DOTALL).replace("\n", " ")
    types, uses = [], []
    for number, declarator in enumerate(_declarators(declaration), first):
        name = re.search(r"([A-Za-z_]\w*)\s*(?=\[|$)", declarator.rstrip())
        if name is None:
            return f"threadgroup {declaration};"  # the compiler says what is wrong with it
        types.append(f"{declarator[: name.end(1)]}__type{declarator[name.end(1) :]}")
        uses.append(f"METALSIM_THREADGROUP({name[1]}, {number});")
    return f"typedef {','.join(types)}; {' '.join(uses)}" + "\n" * lines


def threadgroup_variables(text: str) -> str:
    """`text` with its threadgroup variables declared by METALSIM_THREADGROUP.

    Pointers and references to threadgroup memory stay as they are.
    """
    tokens = _TOKEN.findall(text)
    done: list[str] = []
    before, count, at = "", 0, 0  # the last token of the language proper
    while at < len(tokens):
        token = tokens[at]
        if token == "threadgroup" and before in ("", "{", "}", ";"):
            end = _statement_end(tokens, at)
            declaration = "".join(tokens[at + 1 : end])
            head = re.sub(_COMMENT, "", declaration, flags=re.DOTALL).partition("[")[0]
            if not set(head) & set("*&("):
                done.append(_variables(declaration, count))
                count += done[-1].count("METALSIM_THREADGROUP")
                before, at = ";", end + 1
                continue
        done.append(token)
        if token.strip() and not token.startswith(("//", "/*", "#")):
            before = token
        at += 1
    return "".join(done)


# A pointer or reference to a basic type, with the words in front of it.
_POINTER = re.compile(
    r"(?:^|[(,;{}<=])\s*((?:[A-Za-z_]\w*\s+)*)"
    r"((?:bool|char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat|[TS]|u?int\d+_t)[234]?)"
    r"\s*[*&](?!=)"
)
_SPACES = {"device", "constant", "threadgroup", "thread"}


def without_address_space(text: str) -> tuple[int, str] | None:
    """The first pointer that names no address space, as line and words; None if all do.

    Metal refuses them, also in casts; clang takes them for pointers to a thread's memory.
    """
    code = re.sub(_COMMENT, lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL)
    for found in _POINTER.finditer(code):
        if not _SPACES & set(found[1].split()):
            return code.count("\n", 0, found.start(2)) + 1, f"{found[1]}{found[2]} *"
    return None


def names_restored(message: str) -> str:
    """A message with the variables' own names in place of those of their types."""
    return re.sub(r"'(\w+)__type' \(aka ('[^']*')\)", r"'\1' of type \2", message)


def _argument(number: int, buffer: Buffer) -> str:
    pointer = f"({buffer.type}*)b[{number}]"
    return f"*{pointer}" if buffer.by_reference else pointer


def to_cpp(file: str, text: str, signature: Signature) -> str:
    """The C++ text of a kernel, after its header; compilers name `file` in their messages."""
    arguments = [_argument(i, buffer) for i, buffer in enumerate(signature.buffers)]
    arguments += [_ATTRIBUTES[a] for a in signature.attributes]
    body = threadgroup_variables(_INSTANCE.sub("", text))
    return f"""#line 1 "{file}"
{body}
#line 1 "entry"
extern "C" __attribute__((no_sanitize("thread")))
void metalsim_kernel(void** b, const metalsim::Place* p) {{
  {signature.call}({", ".join(arguments)});
}}
extern "C" __attribute__((visibility("hidden"))) char __ehdr_start, _end;
extern "C" void* const metalsim_image[2] = {{&__ehdr_start, &_end}};
"""
