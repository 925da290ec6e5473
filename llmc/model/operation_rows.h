// Shared by the rows of the table of operations: their work, their workspace, and the values and parameters
// that they make.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "llmc/model/draft.h"
#include "llmc/model/operation.h"
#include "llmc/model/trace.h"

namespace llmc {

inline std::int64_t features_of(const Part& part, int value) { return part.value(value).features(); }

// FLOPs per feature of the first output.
template <int Forward, int Backward>
Work elementwise(const Part& part, const Node& node) {
    const auto features = static_cast<double>(features_of(part, node.out[0]));
    return {.other = Forward * features, .other_backward = Backward * features};
}

// For requests of workspace, which has the most that a node asks for.
inline void at_least(std::int64_t& size, std::int64_t needed) { size = std::max(size, needed); }
inline void ask_for_rows(const Part& part, const Node& node, const PartSizes&, WorkspaceRequest& request) {
    at_least(request.channels, features_of(part, node.out[0]));
}
inline void ask_for_layernorm(const Part& part, const Node& node, const PartSizes& sizes,
                              WorkspaceRequest& request) {
    ask_for_rows(part, node, sizes, request);
    at_least(request.layernorm_channels, features_of(part, node.out[0]));
}

// A vector for each token.
inline Value stream(const Trace& t, std::string name, std::string label, std::int64_t width) {
    return {.name = std::move(name), .label = std::move(label), .shape = {t.tokens(), width}};
}
// One fp32 number for each token.
inline Value statistic(const Trace& t, std::string name) {
    return {.name = std::move(name), .shape = {t.tokens()}, .is_fp32 = true};
}
// A parameter that begins with equal values.
inline ParamSpec vector_of(const std::string& name, const Shape& shape, double value,
                           std::optional<int> tensor_dim = {}) {
    return {
        .name = name, .shape = shape, .init = {.mean = value}, .tensor_dim = tensor_dim, .is_vector = true};
}
inline void check_widths(const Trace& t, const Node& node) {
    if (t[node.in[0]].features() != t[node.in[1]].features())
        t.refuse(node, "adds two values of different widths");
}
// The unit in a parameter's full name "<unit>.<param>".
inline std::string unit_of(const std::string& parameter) { return parameter.substr(0, parameter.find('.')); }

}  // namespace llmc
