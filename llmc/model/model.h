// A model: its parts in their order, each traced once however often it comes. A family's file makes it (gpt2.cpp); everything
// else that is said of a model is derived from it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/model/part_lists.h"
#include "llmc/model/trace.h"
#include "llmc/model/units.h"

namespace llmc {

// A size that an option gives, beside that of the largest model with a name.
struct ModelSize {
    std::string_view option;
    std::int64_t value, usual;
    double times() const { return static_cast<double>(value) / static_cast<double>(usual); }
};

struct Model {
    // Parts that come so many times, in turn: A, B, A, B.
    struct Run {
        std::vector<Part> parts;
        std::int64_t count = 1;  // of each
        bool is_layer = false;   // a pipeline puts layers where they fit, and the rest at its ends
    };
    std::vector<Run> runs;
    std::int64_t sequence_length = 0;  // T, tokens of context
    std::int64_t vocabulary = 0;       // V
    std::string description{};         // its sizes, for a person
    std::vector<ModelSize> sizes{};    // of those that memory grows with
    // How its files are other than its units say.
    struct Files {
        std::string prefix{};                    // of names, which may be left out
        std::vector<std::string> passed_over{};  // ends of the names of tensors that are no weights
        // The head's name, and the table's. A tied head is the table; an untied one that a file lacks begins as its copy.
        std::string head{}, table{};
        // Options of a model without biases, and of one with an untied head, for messages.
        std::string no_biases{}, untied_head{};
    } files{};

    std::int64_t layers() const;
};

// Floating-point operations of a part's forward pass on a token: of its products, and of the attention scores and what they
// weigh, half of what Chowdhery et al. count ("PaLM", 2022, appendix B), since nobody computes the half that the causal mask
// hides. A part without either costs its other operations. Backward takes twice as many.
double forward_cost(const Part& part);
// Of its backward pass what makes the gradients of weights.
double weight_cost(const Part& part);
// Forward and backward, of all parts with products.
double training_flops_per_token(const Model& model);

// What tensor-parallel ranks share, each the same number of it: how many there are, and of what ("heads (--heads)").
struct SharedByRanks {
    std::int64_t count;
    std::string what;
};
std::vector<SharedByRanks> shared_by_ranks(const Model& model);

// What the operations of all parts ask of a device.
WorkspaceRequest workspace_request(const Model& model, const PartSizes& sizes);

// Trainable parameters, without padding; what parts share counts once. Exact for all that a machine could bear, and of no use
// as a whole number for what none could.
double parameters_about(const Model& model);
inline std::int64_t count_parameters(const Model& model) {
    return static_cast<std::int64_t>(parameters_about(model));
}

// A model part by part: what lists of actions, and the store, need to know of it.
struct Outline {
    struct OutlinedPart {
        std::string name;           // "block 3"
        int kind = 0;               // parts of one kind are alike: parts_of_kinds has it
        int layer = -1;             // its number among the layers; -1: none
        int own_unit = 0;           // in whose name a person knows it
        std::vector<int> units{};   // whose parameters it uses, in the order of use
        std::vector<int> places{};  // of each of its parameters: the unit
        // The widths of the stream before and behind it, by their numbers; -1: tokens, or losses.
        int input_width = -1, output_width = -1;

        bool takes_tokens() const { return input_width < 0; }
        bool makes_losses() const { return output_width < 0; }
        bool is_layer() const { return layer >= 0; }
    };
    struct OutlinedUnit {
        UnitSpec spec;
        int class_of_layers =
            -1;  // the first unit that it may take turns with: of layers that are alike; -1: it has no turns
        bool sums_replicated = false;  // with sequence parallelism
        std::vector<int> parts{};      // that use it, in their order
    };
    struct Kind {
        Part part;
        bool keeps = false;  // something from its forward to its backward pass
        bool backward_reads_parameters = false;
        bool splits_backward = false;  // has two parts of it
        int split_number = -1;         // among the kinds that do
    };
    std::vector<OutlinedPart> parts;
    std::vector<OutlinedUnit> units;
    std::vector<Kind> kinds;
    std::vector<std::int64_t> widths;  // of streams
    Model::Files files;
    std::vector<int> layers{};  // their parts
    int split_kinds = 0;

    const OutlinedPart& part(int number) const { return parts[static_cast<std::size_t>(number)]; }
    const OutlinedUnit& unit(int number) const { return units[static_cast<std::size_t>(number)]; }
    const Kind& kind_of(const OutlinedPart& part) const { return kinds[static_cast<std::size_t>(part.kind)]; }
    const Kind& kind_of(int part_number) const { return kind_of(part(part_number)); }
    // A part with a stream behind it; beyond the last one, as that is.
    const OutlinedPart& part_with_output(int number) const {
        return part(std::min(number, static_cast<int>(parts.size()) - 2));
    }
    // Those of these parts that use a unit.
    std::span<const int> users(int unit, int first_part, int end_part) const;
    bool uses(int unit, int first_part, int end_part) const {
        return !users(unit, first_part, end_part).empty();
    }
    int units_count() const { return static_cast<int>(units.size()); }
};

// ProgrammingError that names an operation's parameter where parts that share it do not say the same of it.
Outline outline_of(const Model& model);

// The lists of all kinds of parts.
struct ModelLists {
    std::vector<PartLists> kinds;
    Scratch scratch;

    const PartLists& of(const Outline::OutlinedPart& part) const {
        return kinds[static_cast<std::size_t>(part.kind)];
    }
};
// The outline outlives them.
ModelLists derive_lists(const Outline& outline, const PartSizes& sizes);

}  // namespace llmc
