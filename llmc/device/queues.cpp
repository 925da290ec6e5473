#include "llmc/device/queues.h"

namespace llmc {

std::string_view name_of(StreamKind stream) {
    switch (stream) {
        case StreamKind::compute:
            return "compute";
        case StreamKind::communication:
            return "communication";
        case StreamKind::activations_in:
            return "activations in";
        case StreamKind::activations_out:
            return "activations out";
        case StreamKind::gradients_in:
            return "gradients in";
        case StreamKind::gradients_out:
            return "gradients out";
        case StreamKind::copy:
            return "copy";
    }
    return "?";
}

}  // namespace llmc
