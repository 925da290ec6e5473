#include "llmc/comm/communicator.h"

#include "llmc/core/text.h"

namespace llmc {

std::string_view name_of(CallKind kind) {
    return name_among(kind, "all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv");
}

}  // namespace llmc
