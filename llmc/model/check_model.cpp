// Checks a model's parts together. Trace checks each operation, and check_lists each part.
#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/model/model.h"
#include "llmc/model/operation.h"

namespace llmc {

namespace {

[[noreturn]] void refuse(const Part& part, std::string_view why) {
    programming_error(fmt::format("{}: {}", part.name, why));
}

// A table has a row for each token of the vocabulary. Each tensor-parallel rank has equally many rows, with
// padding. The sums of its gradient and of the logits rely on that.
void check_table(const Model& model, const Part& part, const Node& node) {
    const ParamSpec& table = part.parameters[static_cast<std::size_t>(node.parameters[0])].spec;
    if (table.shape[0] != model.vocabulary) {
        refuse(part, fmt::format("{}: the table {} has {} rows, but the vocabulary has {}", node.name,
                                 table.name, table.shape[0], model.vocabulary));
    }
    if (table.tensor_dim != 0 || table.row_multiple != vocabulary_multiple) {
        refuse(part, fmt::format(
                         "{}: tensor-parallel ranks divide the rows of the table {}: give it .tensor_dim = 0 "
                         "and .row_multiple = vocabulary_multiple",
                         node.name, table.name));
    }
}

void check_positions(const Model& model, const Part& part, const Node& node) {
    if (node.parameters.size() < 2 || node.parameters[1] < 0) return;
    const ParamSpec& table = part.parameters[static_cast<std::size_t>(node.parameters[1])].spec;
    if (table.shape[0] < model.sequence_length || table.tensor_dim || table.row_multiple != 1) {
        refuse(part,
               fmt::format(
                   "{}: the table of positions {} needs {} rows or more, which each tensor-parallel rank "
                   "has whole",
                   node.name, table.name, model.sequence_length));
    }
}

void check_part(const Model& model, const Part& part, bool is_first, bool is_last) {
    if (part.tokens != model.sequence_length) {
        refuse(part, fmt::format("is traced for {} tokens, but a sequence has {}", part.tokens,
                                 model.sequence_length));
    }
    if (part.nodes.empty()) refuse(part, "has no operation");
    if (is_first != part.takes_tokens())
        refuse(part, is_first ? "the first part has no input but the tokens" : "has no input");
    int losses = 0;
    for (const Node& node : part.nodes) {
        if (node.operation->takes_tokens) {
            if (!is_first)
                refuse(part, fmt::format("{} reads tokens, which only the first part has", node.name));
            check_table(model, part, node);
            check_positions(model, part, node);
        }
        if (node.operation->is_forward_in_backward) {
            if (!is_last)
                refuse(part, fmt::format("{} makes losses, which only the last part can", node.name));
            if (++losses > 1) refuse(part, "makes losses twice");
            check_table(model, part, node);
        }
    }
    if (is_last && losses == 0) refuse(part, "the last part makes no losses");
}

}  // namespace

void check_model(const Model& model) {
    check(!model.runs.empty(), "a model has parts");
    for (const Model::Run& run : model.runs) check(!run.parts.empty(), "each run of a model has parts");
    for (const Model::Run& run : model.runs) {
        for (const Part& part : run.parts) {
            const bool is_first = &part == &model.runs.front().parts.front(),
                       is_last = &part == &model.runs.back().parts.back();
            // Steps pass a residual stream from part to part, so there is one.
            if (is_first && is_last)
                refuse(part, "a model has at least two parts; make the head a part of its own");
            if ((is_first || is_last) && run.count > 1) refuse(part, "the first and the last part come once");
            check_part(model, part, is_first, is_last);
            if (is_first && run.is_layer)
                refuse(part, "a layer takes the residual stream, which the first part makes");
        }
    }
}

}  // namespace llmc
