"""A folder of the C++ core as one library."""

def floor(name, exclude = [], **more):
    """All of the folder, compiled as one source, as the wheel compiles it: most of the time is that of headers."""
    sources = native.glob(["*.cc"], exclude = exclude)
    if sources:
        native.genrule(
            name = name + "_in_one",
            srcs = sources,
            outs = [name + "_in_one.cc"],
            cmd = "printf '#include \"%s\"\\n' $(SRCS) >$@",
        )
    native.cc_library(
        name = name,
        srcs = [name + "_in_one.cc"] if sources else [],
        hdrs = native.glob(["*.h"]),
        textual_hdrs = sources,
        **more
    )
