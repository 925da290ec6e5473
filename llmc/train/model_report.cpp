#include "llmc/train/model_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "llmc/core/text.h"

namespace llmc {

namespace {

std::string init_text(const Init& init) {
    return init.stddev > 0 ? fmt::format("normal {:.4g}", init.stddev) : fmt::format("{:g}", init.mean);
}

class ModelText {
  public:
    explicit ModelText(const RunSpec& spec)
        : spec_(spec), sizes_{.split = spec.mesh.split(), .dtype = spec.dtype} {}

    std::string run() {
        const Model& model = spec_.model;
        add("{}\n", model.description);
        add("{} parameters; {:.4g} FLOPs a token, forward and backward; {}; {}\n",
            human_count(parameters_about(model)), training_flops_per_token(model),
            spec_.mesh.description().empty() ? "one process" : spec_.mesh.description(),
            name_of(spec_.dtype));
        std::int64_t layer = 0;
        Scratch scratch;
        for (const Model::Run& run : model.runs) {
            add_part(run, layer, derive_lists(run.part, sizes_, scratch));
            layer = saturated_sum(layer, run.is_layer ? run.count : 0);
        }
        add("\nOperations are of one sequence of {} tokens. FLOPs are those of the forward pass on a token; "
            "the backward pass takes "
            "twice as many.\n",
            model.sequence_length);
        return std::move(text_);
    }

  private:
    template <class... Args>
    void add(fmt::format_string<Args...> format, Args&&... args) {
        text_ += fmt::format(format, std::forward<Args>(args)...);
    }

    void add_part(const Model::Run& run, std::int64_t layer, const PartLists& lists) {
        const bool is_one = run.part.name.find("{}") == std::string::npos;
        const std::string numbers =
            run.count == 1 ? std::to_string(layer) : fmt::format("{} to {}", layer, layer + run.count - 1);
        add("\n{}\n", is_one ? run.part.name : fmt::format(fmt::runtime(run.part.name), numbers));
        for (const PartParameter& parameter : run.part.parameters) add_parameter(run, parameter);
        add("\n  {:<14} {:<24} {:<20} {:<10} {:>14} {:>12}\n", "operation", "makes", "shape here", "backward",
            "bytes", "FLOPs");
        for (const Node& node : run.part.nodes) add_node(run.part, node, lists);
        const std::uint64_t forward = bytes_sent(lists.forward), backward = bytes_sent(lists.backward);
        add("  kept {} a sequence; with --recompute selective {}, with block {}",
            human_bytes(kept(lists, RecomputeKind::none)), human_bytes(kept(lists, RecomputeKind::selective)),
            human_bytes(kept(lists, RecomputeKind::block)));
        if (forward + backward > 0)
            add("; sends to ranks that share it {} forward, {} backward", human_bytes(forward),
                human_bytes(backward));
        add("\n");
    }

    void add_parameter(const Model::Run& run, const PartParameter& parameter) {
        const ParamSpec& spec = parameter.spec;
        const Shape stored = stored_shape(spec, spec_.mesh.tensor);
        add("  {:<26} {:<20} {}{}{}{}\n",
            fmt::format(
                "{}.{}",
                parameter.unit.substr(0, parameter.unit.find('{')) + (run.part.unit.empty() ? "" : "*"),
                spec.name),
            to_string(spec.shape), init_text(spec.init), spec.decays() ? ", decays" : "",
            stored == spec.shape ? "" : ", here " + to_string(stored), parameter.is_tied ? ", tied" : "");
    }

    void add_node(const Part& part, const Node& node, const PartLists& lists) {
        const Work work = node.operation->work(part, node);
        const double flops = work.products + work.pairs * static_cast<double>(part.tokens) / 2 + work.other;
        bool is_first = true;
        for (const int value : node.out) {
            const Value& made = part.value(value);
            const auto kept = std::ranges::find(lists.kept, made.name, &PartBuffer::name);
            const bool is_kept = kept != lists.kept.end();
            const Shape shape = own_shape(made, sizes_);
            const std::int64_t bytes = saturated_product(
                shape.elements(),
                static_cast<std::int64_t>(size_of(made.is_fp32 ? DType::fp32 : spec_.dtype)));
            add("  {:<14} {:<24} {:<20} {:<10} {:>14} {:>12}\n", is_first ? node.operation->name : "",
                made.name, to_string(shape),
                !is_kept                                 ? ""
                : kept->is_cheap && !part.makes_losses() ? "kept, cheap"
                                                         : "kept",
                is_kept ? human_bytes(bytes) : "", is_first && flops > 0 ? human_count(flops) : "");
            is_first = false;
        }
    }

    std::int64_t kept(const PartLists& lists, RecomputeKind kind) const {
        std::int64_t bytes = 0;
        for (std::size_t i = 0; i < lists.kept.size(); ++i) {
            const PartBuffer& buffer = lists.kept[i];
            if (lists.is_kept(i, lists.part->makes_losses() ? RecomputeKind::none : kind))
                bytes =
                    saturated_sum(bytes, saturated_product(buffer.shape.elements(),
                                                           static_cast<std::int64_t>(size_of(buffer.dtype))));
        }
        return bytes;
    }

    const RunSpec& spec_;
    PartSizes sizes_;
    std::string text_;
};

}  // namespace

std::string model_text(const RunSpec& spec) { return ModelText(spec).run(); }

}  // namespace llmc
