"""XLA's FFI headers, from the jaxlib that a Python interpreter finds."""

def _xla_headers(repository_ctx):
    python = repository_ctx.os.environ.get("PYTHON_BIN_PATH") or repository_ctx.which("python3")
    if not python:
        fail("no python3 on PATH; set PYTHON_BIN_PATH")
    result = repository_ctx.execute([python, "-c", "import jax.ffi; print(jax.ffi.include_dir())"])
    if result.return_code != 0:
        fail("{} cannot tell where XLA's headers are; set PYTHON_BIN_PATH to a Python that has jax\n{}".format(
            python,
            result.stderr,
        ))
    repository_ctx.symlink(result.stdout.strip(), "include")
    repository_ctx.file("BUILD", """
cc_library(
    name = "ffi",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
""")

xla_headers = repository_rule(
    implementation = _xla_headers,
    environ = ["PYTHON_BIN_PATH", "PATH"],
    local = True,
)
