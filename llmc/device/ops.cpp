#include "llmc/device/ops.h"

namespace llmc {

std::string_view name_of(const Op& op) {
    return std::visit([]<class O>(const O&) { return O::name; }, op);
}

OpCost cost_of(const Op& op) {
    return std::visit([](const auto& of) { return of.cost(); }, op);
}

}  // namespace llmc
