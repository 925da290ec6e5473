"""Faults in the host code for GPUs that test_simulated_gpu.py must find. Each is a changed place in a copy of the source, for
a separate program (build/test/train_gpt-planted). It is active if the variable PLANT has the fault's name.

    planted_faults.py SOURCE           prints the source with its faults (test/simt/runtime.mk has the sources)
"""

import dataclasses
import sys

STREAMS, FEED = "llmc/parallel/step/device_streams.cpp", "llmc/parallel/step/token_feed.cpp"
PRODUCTS, BIAS = "llmc/device/cuda/lt_products.cpp", "llmc/device/cuda/ops_matmul.cu"
NCCL = "llmc/comm/nccl/nccl_communicator.cpp"


@dataclasses.dataclass
class Fault:
    name: str
    source: str
    right: str  # text that occurs once
    wrong: str
    ranks: int = 1  # the number of processes on which it can show
    micro_batches: int = 1
    options: tuple = ()  # options that change no bit of the right run


def left_out(name, source, right, before="", **conditions):
    """A statement that is left out. `before` is the text before it, if the statement occurs more than once."""
    return Fault(name, source, before + right, f'{before}if (!planted("{name}")) {right}', **conditions)


FAULTS = [
    # A collective does not wait for the gradients that it sums, or an update does not wait for their sum.
    left_out("no wait for the action before", STREAMS, "streams_.wait(event_of(events_, after));", ranks=2),
    left_out("no wait for the end of communication", STREAMS, "streams_.wait(end);", ranks=2),
    # Each rank that updates a share starts with the all-gather of its parameters, while the weights still come from the host.
    left_out("no wait for the list before", STREAMS, "streams_.wait(start_);", ranks=2, options=("--zero-stage=1",)),
    left_out("no wait for tokens that come ahead", FEED, "streams_->wait(arrived_);",
             before="if (ahead_ && place == ahead_->place) {\n        ", micro_batches=4),
    left_out("tokens brought to a buffer in use", FEED, "streams_->wait(free_);", micro_batches=4),
    # With fewer micro-batches, there is room for a whole step's tokens, and only a validation would have to wait.
    Fault("staging filled before it is copied", FEED,
          """Staging& staging = staging_[next_staging_];
    next_staging_ = (next_staging_ + 1) % staging_.size();
    if (streams_) streams_""",
          """const bool early = planted("staging filled before it is copied");
    Staging& staging = staging_[early ? 0 : next_staging_];
    next_staging_ = (next_staging_ + 1) % staging_.size();
    if (streams_ && !early) streams_""", micro_batches=4),
    Fault("product on the wrong stream", PRODUCTS,
          "plan.run(handle_, plan.algorithm, operands, workspace_, workspace_bytes, streams_.selected());",
          "plan.run(handle_, plan.algorithm, operands, workspace_, workspace_bytes,\n"
          '        planted("product on the wrong stream") ? streams_.stream(StreamKind::copy) : streams_.selected());'),
    Fault("kernel on the wrong stream", BIAS, "bias_gradient(on(), ",
          'const LaunchContext copies{chip_, streams_.stream(StreamKind::copy), nullptr};\n'
          '            bias_gradient(planted("kernel on the wrong stream") ? copies : on(), '),
    Fault("collective on the wrong stream", NCCL, 'comm_, streams_.selected()),\n                   "ncclReduceScatter");',
          'comm_,\n            planted("collective on the wrong stream") ? streams_.stream(StreamKind::copy)'
          ' : streams_.selected()),\n                   "ncclReduceScatter");', ranks=2),
]

PLANTED = """#include <cstdlib>
#include <string_view>

namespace {
bool planted(std::string_view fault) {
    const char* const asked = std::getenv("PLANT");
    return asked != nullptr && fault == asked;
}
}  // namespace

"""


def with_faults(source):
    with open(source) as file:
        text = file.read()
    for fault in FAULTS:
        if fault.source != source:
            continue
        if text.count(fault.right) != 1:
            sys.exit(f"error: {source} does not have exactly once, for the planted fault '{fault.name}':\n{fault.right}")
        text = text.replace(fault.right, fault.wrong)
    return PLANTED + text


if __name__ == "__main__":
    print(with_faults(sys.argv[1]), end="")
