// Describes a model: its parts in order; a part that is repeated is traced only once. A family's file makes
// it (gpt2.cpp). Everything else about the model is derived from it.
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

// A size that an option sets; `of_largest` is that of the largest named model.
struct ModelSize {
    std::string_view option;
    std::int64_t value, of_largest;
    double times() const { return static_cast<double>(value) / static_cast<double>(of_largest); }
};

struct Model {
    // A group of parts that is repeated `count` times: A, B, A, B.
    struct Run {
        std::vector<Part> parts;
        std::int64_t count = 1;  // repetitions of each part
        bool is_layer = false;   // layers are distributed over pipeline stages; other parts stay with a layer
    };
    std::vector<Run> runs;
    std::int64_t sequence_length = 0;  // T, tokens of context
    std::int64_t vocabulary = 0;       // V
    std::string description{};         // its sizes, as text
    std::vector<ModelSize> sizes{};    // those with which memory grows
    // How weight files (safetensors) of this family differ from the units' names and tensors.
    struct Files {
        std::string prefix{};                    // the beginning of names, but not the head's; may be missing
        bool writes_prefix = false;              // whether files that this program writes have it
        std::vector<std::string> passed_over{};  // ends of names of tensors that are no weights
        // The names of the head and of the table. A tied head is the table. If a file lacks an untied head,
        // the head begins as a copy of the table.
        std::string head{}, table{};
        // For messages: the options of a model without biases, and of one with an untied head.
        std::string no_biases{}, untied_head{};

        // The name of a tensor in a file that this program writes. That of an adapter's (low_rank.h) is PEFT's.
        std::string name_in_file(const std::string& full_name) const;
    } files{};

    std::int64_t layers() const;
};

// Floating-point operations per token of a part's forward pass: those of its products and of attention.
// Attention counts half of what Chowdhery et al. count ("PaLM", 2022, appendix B), since the half that the
// causal mask hides is not computed. A part with neither counts its other operations.
double forward_cost(const Part& part);
// The same of the backward pass: of twice as many, but for the gradients of matrices that are frozen.
double backward_cost(const Part& part);
// The part of the backward pass that computes weight gradients, in the same unit.
double weight_cost(const Part& part);
// Floating-point operations per token of the forward and backward pass of all parts with products.
double training_flops_per_token(const Model& model);

// Throws a ProgrammingError that names the part if a step could not run the model, or would compute something
// else than its description says. Faults are parts of other lengths, tokens read after the first part, losses
// made before the last one, and vocabulary tables that ranks cannot divide.
void check_model(const Model& model);

// The things of which each tensor-parallel rank has an equal share.
std::vector<Piece> shared_by_ranks(const Model& model);

// The workspace that the operations of all parts need.
WorkspaceRequest workspace_request(const Model& model, const PartSizes& sizes);

// The number of parameters, without padding; shared ones count once. The double is exact up to 2^53, beyond any model
// that fits a machine. Call count_parameters() only for such models. `trained`: without frozen ones.
double parameters_about(const Model& model, bool trained = false);
inline std::int64_t count_parameters(const Model& model, bool trained = false) {
    return static_cast<std::int64_t>(parameters_about(model, trained));
}
// The bytes that they take, without padding.
double parameter_bytes_about(const Model& model, DType compute);
// The numbers of all parameters and of those that are trained, if some are frozen, as a text.
std::string parameters_text(const Model& model);

// A model part by part, as the lists of actions and the parameter store need it.
struct Outline {
    struct OutlinedPart {
        std::string name;                    // "block 3".
        int kind = 0;                        // In `kinds`; parts of one kind are alike.
        int layer = -1;                      // Its number among the layers; -1: no layer.
        int own_unit = 0;                    // The unit whose name stands for the part in messages.
        std::vector<int> units{};            // Units whose parameters it uses, in the order of use.
        std::vector<int> parameter_units{};  // For each of its parameters, the unit.
        // Indices in `widths` of the residual stream before and after it; -1: it takes tokens, or makes
        // losses.
        int input_width = -1, output_width = -1;

        bool takes_tokens() const { return input_width < 0; }
        bool makes_losses() const { return output_width < 0; }
        bool is_layer() const { return layer >= 0; }
    };
    struct OutlinedUnit {
        UnitSpec spec;
        // The first unit of like layers, with which this one may share rotating buffers; -1: none.
        int class_of_layers = -1;
        // Whether ranks sum the gradients of its replicated tensors.
        ReplicatedSums sums_replicated{};
        std::vector<int> parts{};  // parts that use it, in order
    };
    struct Kind {
        Part part;
        bool keeps = false;  // keeps something from its forward pass for its backward pass
        bool backward_reads_parameters = false;
        bool splits_backward = false;  // its backward pass can run in two halves
        int split_number = -1;         // its number among the kinds that split; -1: it does not split
    };
    std::vector<OutlinedPart> parts;
    std::vector<OutlinedUnit> units;
    std::vector<Kind> kinds;
    std::vector<std::int64_t> widths;  // the widths of residual streams
    Model::Files files;
    std::vector<int> layers{};  // the part of each layer
    int split_kinds = 0;

    const OutlinedPart& part(int number) const { return parts[static_cast<std::size_t>(number)]; }
    const OutlinedUnit& unit(int number) const { return units[static_cast<std::size_t>(number)]; }
    const Kind& kind_of(const OutlinedPart& part) const { return kinds[static_cast<std::size_t>(part.kind)]; }
    const Kind& kind_of(int part_number) const { return kind_of(part(part_number)); }
    // A part with an output stream. Numbers beyond the last such part give that part.
    const OutlinedPart& part_with_output(int number) const {
        return part(std::min(number, static_cast<int>(parts.size()) - 2));
    }
    // The parts among [first_part, end_part) that use a unit.
    std::span<const int> users(int unit, int first_part, int end_part) const;
    bool uses(int unit, int first_part, int end_part) const {
        return !users(unit, first_part, end_part).empty();
    }
    int units_count() const { return static_cast<int>(units.size()); }
};

// For each part, the number of its first operand of products in 8 bits among those of the whole model, which do not
// depend on the mesh; then the number of all.
std::vector<std::int64_t> first_amax(const Outline& outline);

// Derives the outline. Throws a ProgrammingError that names the parameter if the parts that share it describe
// it differently.
Outline outline_of(const Model& model);

// The lists of all kinds of parts.
struct ModelLists {
    std::vector<PartLists> kinds;
    Scratch scratch;

    const PartLists& of(const Outline::OutlinedPart& part) const {
        return kinds[static_cast<std::size_t>(part.kind)];
    }
};
// The outline must outlive the result.
ModelLists derive_lists(const Outline& outline, const PartSizes& sizes);

}  // namespace llmc
