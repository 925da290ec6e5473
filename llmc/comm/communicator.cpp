#include "llmc/comm/communicator.h"

namespace llmc {

std::string_view name_of(CallKind kind) {
    switch (kind) {
        case CallKind::all_reduce:
            return "all_reduce";
        case CallKind::reduce_scatter:
            return "reduce_scatter";
        case CallKind::all_gather:
            return "all_gather";
        case CallKind::broadcast:
            return "broadcast";
        case CallKind::send:
            return "send";
        case CallKind::recv:
            return "recv";
    }
    return "?";
}

}  // namespace llmc
