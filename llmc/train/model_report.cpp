// --print-model: the model of a run as text (report.h).
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/train/report.h"

namespace llmc {

namespace {

std::string init_text(const Init& init) {
    return init.stddev > 0  ? fmt::format("normal {:.4g}", init.stddev)
           : init.bound > 0 ? fmt::format("uniform +-{:.4g}", init.bound)
                            : fmt::format("{:g}", init.mean);
}

class ModelText {
  public:
    ModelText(const RunSpec& spec, const DeviceSizes& device)
        : spec_(spec), device_(device), sizes_{.split = spec.mesh.split(), .dtype = spec.dtype} {
        // Equal parts have equal units, so one part of each kind is enough.
        Model one_of_each = spec.model;
        for (Model::Run& run : one_of_each.runs) run.count = 1;
        outline_ = outline_of(one_of_each);
    }

    std::string run() {
        const Model& model = spec_.model;
        add("{}\n", model.description);
        const double all = parameters_about(model), trained = parameters_about(model, true);
        add("{} parameters{}; {:.4g} FLOPs a token, forward and backward; {}; {}\n", human_count(all),
            trained == all ? "" : fmt::format(", {} of them trained", human_count(trained)),
            training_flops_per_token(model),
            spec_.mesh.description().empty() ? "one process" : spec_.mesh.description(),
            name_of(spec_.dtype));
        std::int64_t layer = 0;
        Scratch scratch;
        int number = 0;  // index of the part in the outline
        for (const Model::Run& run : model.runs) {
            for (std::size_t i = 0; i < run.parts.size(); ++i) {
                add_part(run, i, layer, derive_lists(run.parts[i], sizes_, scratch));
                add_shards(run.parts[i], outline_.part(number++));
            }
            if (run.is_layer)
                layer = saturated_sum(layer, saturated_product(run.count, std::ssize(run.parts)));
        }
        add("\nShapes are those on one rank. Bytes are for one sequence of {} tokens. `moves` counts each "
            "operand "
            "of an operation once. FLOPs\nare those of the forward pass per token. `for backward` says which "
            "results are kept for the backward pass and which are recomputed\nthere. A `kept or recomputed` "
            "result is recomputed with --recompute selective. With --recompute block, layers keep only "
            "their\n"
            "input.\n",
            model.sequence_length);
        add("{}\n", what_is_sent());
        return std::move(text_);
    }

  private:
    template <class... Args>
    void add(fmt::format_string<Args...> format, Args&&... args) {
        text_ += fmt::format(format, std::forward<Args>(args)...);
    }

    // "0 to 11", or "1, 3 to 11" if parts alternate.
    static std::string numbers_of(const Model::Run& run, std::size_t place, std::int64_t first_layer) {
        const std::int64_t in_turn = std::ssize(run.parts);
        const std::int64_t first =
            saturated_sum(run.is_layer ? first_layer : 0, static_cast<std::int64_t>(place));
        const std::int64_t last = saturated_sum(first, saturated_product(run.count - 1, in_turn));
        if (run.count == 1) return std::to_string(first);
        if (run.count == 2 && in_turn > 1) return fmt::format("{}, {}", first, last);
        return in_turn > 1 ? fmt::format("{}, {} to {}", first, first + in_turn, last)
                           : fmt::format("{} to {}", first, last);
    }

    void add_part(const Model::Run& run, std::size_t place, std::int64_t layer, const PartLists& lists) {
        const Part& part = run.parts[place];
        is_layer_ = run.is_layer;
        const bool is_one = part.name.find("{}") == std::string::npos;
        add("\n{}\n",
            is_one ? part.name : fmt::format(fmt::runtime(part.name), numbers_of(run, place, layer)));
        name_width_ = 26;
        for (const PartParameter& parameter : part.parameters)
            name_width_ = std::max(name_width_, full_name(parameter).size());
        for (const PartParameter& parameter : part.parameters) add_parameter(parameter);
        value_width_ = 24;
        for (const Value& value : part.values) value_width_ = std::max(value_width_, value.name.size());
        add("\n  {:<14} {:<{}} {:<20} {:<18} {:>10} {:>10} {:>10}\n", "operation", "makes", value_width_,
            "shape here", "for backward", "bytes", "moves", "FLOPs");
        for (const Node& node : part.nodes) add_node(part, node, lists);
        // The backward pass of losses includes their forward pass.
        const std::uint64_t forward = bytes_sent(lists.forward);
        const std::uint64_t backward = bytes_sent(lists.backward) - (part.makes_losses() ? forward : 0);
        add("  keeps {} per sequence", human_bytes(kept(lists, RecomputeKind::none)));
        if (is_layer_) {
            add("; with --recompute selective {}, with block {}",
                human_bytes(kept(lists, RecomputeKind::selective)),
                human_bytes(kept(lists, RecomputeKind::block)));
        }
        if (forward + backward > 0)
            add("; sends {} forward and {} backward per sequence to its tensor-parallel group",
                human_bytes(forward), human_bytes(backward));
        add("\n");
    }

    // Adds the shards of the part's units, and the bytes sent to the next stage. A unit that parts share
    // appears once.
    void add_shards(const Part& part, const Outline::OutlinedPart& outlined) {
        for (std::size_t i = 0; i < part.parameters.size(); ++i) {
            if (shown_.insert(outlined.parameter_units[i]).second)
                add_unit(part.parameters[i].unit, outlined.parameter_units[i]);
        }
        if (spec_.mesh.pipeline > 1 && outlined.is_layer())
            add("  a pipeline stage that ends here sends {} per sequence to the next stage and receives as "
                "many bytes of gradients\n",
                human_bytes(
                    saturated_product(sizes_.split.tokens(part.tokens),
                                      saturated_product(part.output_width(),
                                                        static_cast<std::int64_t>(size_of(spec_.dtype))))));
    }
    void add_unit(const std::string& name, int number) {
        const Sharding& sharding = spec_.mesh.sharding;
        if (sharding.keeps_optimizer_whole() || sharding.shards == 1) return;
        const UnitLayout layout(outline_.unit(number).spec, spec_.mesh.tensor_place());
        const std::int64_t elements = layout.padded_elements(spec_.mesh.data_ranks());
        add("  {}: {} elements here with padding, in {} shards of {}\n", starred(name), grouped(elements),
            sharding.shards, grouped(elements / sharding.shards));
    }

    // The name for all layers: "h.*".
    static std::string starred(std::string name) {
        if (const std::size_t place = name.find("{}"); place != std::string::npos)
            name.replace(place, 2, "*");
        return name;
    }

    // The same text as in the header of a run.
    std::string what_is_sent() const {
        try {
            const std::string text = sent_text(needs_of(spec_, device_, 0).stages);
            if (text.empty()) return "Sent: nothing.";
            // Beyond this, sums of bytes saturate.
            if (parameters_about(spec_.model) > 0x1p56) return "Sent: too many bytes to count.";
            return fmt::format("Sent: {}.", text);
        } catch (const UserError& error) {
            return fmt::format("These options do not make a step: {}.", error.what());
        }
    }

    static std::string full_name(const PartParameter& parameter) {
        return fmt::format("{}.{}", starred(parameter.unit), parameter.spec.name);
    }
    void add_parameter(const PartParameter& parameter) {
        const ParamSpec& spec = parameter.spec;
        const Shape stored = stored_shape(spec, spec_.mesh.tensor);
        const std::string begins = spec.is_nf4      ? "frozen, in 4 bits"
                                   : spec.is_frozen ? "frozen"
                                                    : init_text(spec.init);
        add("  {:<{}} {:<20} {}{}{}{}\n", full_name(parameter), name_width_, to_string(spec.shape), begins,
            spec.decays() && !spec.is_frozen ? ", decays" : "",
            stored == spec.shape ? "" : ", here " + to_string(stored), parameter.is_tied ? ", tied" : "");
    }

    void add_node(const Part& part, const Node& node, const PartLists& lists) {
        const Work work = node.operation->work(part, node);
        const double flops = work.products + work.pairs * static_cast<double>(part.tokens) / 2 + work.other;
        bool is_first = true;
        for (const int value : node.out) {
            const Value& made = part.value(value);
            const std::string_view becomes = kept_or_recomputed(part, node, value, lists);
            const Shape shape = own_shape(made, sizes_);
            const std::int64_t bytes = saturated_product(
                shape.elements(),
                static_cast<std::int64_t>(size_of(made.is_fp32 ? DType::fp32 : spec_.dtype)));
            const std::int64_t moved = is_first ? bytes_moved(node, lists) : 0;
            add("  {:<14} {:<{}} {:<20} {:<18} {:>10} {:>10} {:>10}\n", is_first ? node.operation->name : "",
                made.name, value_width_, to_string(shape), becomes, becomes.empty() ? "" : human_bytes(bytes),
                moved > 0 ? human_bytes(moved) : "", is_first && flops > 0 ? human_count(flops) : "");
            is_first = false;
        }
    }

    // The bytes that the forward calls of an operation read and write, each operand once.
    static std::int64_t bytes_moved(const Node& node, const PartLists& lists) {
        std::int64_t bytes = 0;
        for (const ListCall& call : lists.forward) {
            if (call.node != &node) continue;
            for (const ListOperand& operand : call.operands) {
                const auto size = static_cast<std::int64_t>(size_of(operand.dtype));
                if (operand.space != Space::none)
                    bytes = saturated_sum(bytes, saturated_product(operand.shape.elements(), size));
            }
        }
        return bytes;
    }

    // The column `for backward`; empty if the backward pass does not need the value.
    std::string_view kept_or_recomputed(const Part& part, const Node& node, int value,
                                        const PartLists& lists) const {
        const auto kept = std::ranges::find(lists.kept, value, &PartBuffer::value);
        if (kept != lists.kept.end()) return kept->is_cheap && is_layer_ ? "kept or recomputed" : "kept";
        const auto writes_it = [&](const ListOperand& operand) {
            return operand.access == Access::write && operand.storage >= 0 &&
                   lists.storages[static_cast<std::size_t>(operand.storage)] == part.value(value).name;
        };
        const bool is_remade = std::ranges::any_of(lists.backward, [&](const ListCall& call) {
            return call.node == &node && std::ranges::any_of(call.operands, writes_it);
        });
        return is_remade && is_layer_ ? "recomputed" : "";
    }

    std::int64_t kept(const PartLists& lists, RecomputeKind kind) const {
        std::int64_t bytes = 0;
        for (std::size_t i = 0; i < lists.kept.size(); ++i) {
            const PartBuffer& buffer = lists.kept[i];
            if (lists.is_kept(i, kind))
                bytes =
                    saturated_sum(bytes, saturated_product(buffer.shape.elements(),
                                                           static_cast<std::int64_t>(size_of(buffer.dtype))));
        }
        return bytes;
    }

    const RunSpec& spec_;
    const DeviceSizes& device_;
    PartSizes sizes_;
    Outline outline_;
    std::set<int> shown_;                           // units
    bool is_layer_ = false;                         // the part that is printed; only layers recompute
    std::size_t name_width_ = 0, value_width_ = 0;  // of the part's parameters and values
    std::string text_;
};

}  // namespace

std::string model_text(const RunSpec& spec, const DeviceSizes& sizes) { return ModelText(spec, sizes).run(); }

}  // namespace llmc
