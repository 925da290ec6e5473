"""Faults in the host code for GPUs that test_simulated_gpu.py must find: each one a place that is changed in a copy of the
source, for a program of their own (build/test/train_gpt-planted), where the variable PLANT has the fault's name.

    planted_faults.py SOURCE           prints the source with its faults (test/simt/runtime.mk has the sources)
"""

import dataclasses
import sys

STREAMS, FEED = "llmc/parallel/device_streams.cpp", "llmc/parallel/token_feed.cpp"
PRODUCTS, BIAS = "llmc/device/cuda/lt_products.cpp", "llmc/device/cuda/ops_matmul.cu"
NCCL = "llmc/comm/nccl/nccl_communicator.cpp"


@dataclasses.dataclass
class Fault:
    name: str
    source: str
    right: str  # text that is there once
    wrong: str
    ranks: int = 1  # on how many processes it can show
    micro_batches: int = 1
    options: tuple = ()  # that change no bit of the right run


def left_out(name, source, right, before="", **conditions):
    """A statement that is not made; `before`: what stands before it, where it is there more than once."""
    return Fault(name, source, before + right, f'{before}if (!planted("{name}")) {right}', **conditions)


FAULTS = [
    # A collective does not wait for the gradients that it sums, nor an update for their sum.
    left_out("no wait for the action before", STREAMS, "queues_.wait(mark_of(marks_, after));", ranks=2),
    left_out("no wait for the end of communication", STREAMS, "queues_.wait(end);", ranks=2),
    # Ranks that update a share each publish it first of all, while the weights still come from the host.
    left_out("no wait for the list before", STREAMS, "queues_.wait(start_);", ranks=2, options=("--zero-stage=1",)),
    left_out("no wait for tokens that come ahead", FEED, "queues_->wait(arrived_);",
             before="if (ahead_ && place == ahead_->place) {\n        ", micro_batches=4),
    left_out("tokens brought to a buffer in use", FEED, "queues_->wait(free_);", micro_batches=4),
    # Where there is room for a whole step's tokens, only a validation could wait.
    Fault("staging filled before it is copied", FEED,
          """Staging& staging = staging_[next_staging_];
    next_staging_ = (next_staging_ + 1) % staging_.size();
    if (queues_) queues_""",
          """const bool early = planted("staging filled before it is copied");
    Staging& staging = staging_[early ? 0 : next_staging_];
    next_staging_ = (next_staging_ + 1) % staging_.size();
    if (queues_ && !early) queues_""", micro_batches=4),
    Fault("product on the wrong stream", PRODUCTS,
          "plan.run(handle_, plan.algorithm, operands, workspace_, workspace_bytes, queues_.selected());",
          "plan.run(handle_, plan.algorithm, operands, workspace_, workspace_bytes,\n"
          '        planted("product on the wrong stream") ? queues_.stream(StreamKind::copy) : queues_.selected());'),
    Fault("kernel on the wrong stream", BIAS, "bias_gradient(on(), ",
          'const LaunchContext copies{chip_, queues_.stream(StreamKind::copy), nullptr};\n'
          '            bias_gradient(planted("kernel on the wrong stream") ? copies : on(), '),
    Fault("collective on the wrong stream", NCCL, 'comm_, queues_.selected()),\n                   "ncclReduceScatter");',
          'comm_,\n            planted("collective on the wrong stream") ? queues_.stream(StreamKind::copy)'
          ' : queues_.selected()),\n                   "ncclReduceScatter");', ranks=2),
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
