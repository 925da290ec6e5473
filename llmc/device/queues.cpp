#include "llmc/device/queues.h"

#include "llmc/core/names.h"

namespace llmc {

std::string_view name_of(StreamKind stream) {
    return name_among(stream, "compute", "communication", "activations in", "activations out", "gradients in",
                      "gradients out", "copy");
}

}  // namespace llmc
