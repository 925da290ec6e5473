#include "llmc/device/queues.h"

namespace llmc {

std::string_view name_of(StreamKind stream) {
    switch (stream) {
        case StreamKind::compute:
            return "compute";
        case StreamKind::communication:
            return "communication";
        case StreamKind::copy:
            return "copy";
    }
    return "?";
}

}  // namespace llmc
