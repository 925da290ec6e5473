// Derives from a model its outline and its costs.
#include "llmc/model/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/device/nf4.h"
#include "llmc/model/low_rank.h"

namespace llmc {

namespace {

// Replaces "{}" in a name by the part's number.
std::string numbered(const std::string& name, std::int64_t number) {
    const std::size_t place = name.find("{}");
    return place == std::string::npos ? name : fmt::format(fmt::runtime(name), number);
}

class Outlining {
  public:
    Outline run(const Model& model) {
        check_model(model);
        outline_.files = model.files;
        for (const Model::Run& run : model.runs) {
            std::vector<int> kinds;
            for (const Part& part : run.parts) kinds.push_back(kind_of(part));
            for (std::int64_t i = 0; i < run.count; ++i) {
                for (std::size_t place = 0; place < run.parts.size(); ++place)
                    add(run.parts[place], kinds[place], run.is_layer,
                        i * std::ssize(run.parts) + static_cast<std::int64_t>(place));
            }
        }
        for (Outline::OutlinedUnit& unit : outline_.units) {
            check(std::ranges::all_of(unit.spec.params,
                                      [&](const ParamSpec& of) {
                                          return of.is_frozen == unit.spec.is_frozen() &&
                                                 of.is_nf4 == unit.spec.is_nf4() &&
                                                 (of.is_frozen || !of.is_nf4);
                                      }),
                  fmt::format("{} is frozen or trained as a whole, and in 4 bits or not", unit.spec.name));
            if (unit.class_of_layers < 0) continue;
            const auto alike = std::ranges::find_if(outline_.units, [&](const Outline::OutlinedUnit& other) {
                return other.class_of_layers >= 0 && other.spec.params == unit.spec.params;
            });
            unit.class_of_layers = static_cast<int>(alike - outline_.units.begin());
        }
        while (agree_on_sums()) continue;
        check_names();
        return std::move(outline_);
    }

  private:
    // Parts of one kind share their lists, and parts share units. If one of them sums a parameter's unit over
    // the tensor ranks, all do. Returns true if it has changed a unit: others may follow.
    bool agree_on_sums() {
        bool has_changed = false;
        for (const Outline::OutlinedPart& part : outline_.parts) {
            std::vector<PartParameter>& parameters =
                outline_.kinds[static_cast<std::size_t>(part.kind)].part.parameters;
            for (std::size_t i = 0; i < parameters.size(); ++i) {
                ReplicatedSums& of_unit =
                    outline_.units[static_cast<std::size_t>(part.parameter_units[i])].sums_replicated;
                ReplicatedSums& of_kind = parameters[i].sums_of_unit;
                has_changed = has_changed || of_unit != of_kind;
                of_unit.add(of_kind);
                of_kind = of_unit;
            }
        }
        return has_changed;
    }

    // A tie to a parameter of another part's own unit makes a second unit, and a second tensor of that name.
    void check_names() const {
        std::set<std::string> names;
        for (const Outline::OutlinedUnit& unit : outline_.units) {
            for (const ParamSpec& param : unit.spec.params) {
                const std::string name = fmt::format("{}.{}", unit.spec.name, param.name);
                if (!names.insert(name).second) {
                    programming_error(fmt::format(
                        "{} is the name of two tensors; a parameter of a layer cannot be tied", name));
                }
            }
        }
    }

    // `number` is the part's number in its run. A layer is numbered among the layers instead.
    void add(const Part& of, int kind, bool is_layer, std::int64_t number) {
        Outline::OutlinedPart part;
        part.kind = kind;
        if (is_layer) {
            number = part.layer = static_cast<int>(outline_.layers.size());
            outline_.layers.push_back(static_cast<int>(outline_.parts.size()));
        }
        part.name = numbered(of.name, number);
        if (!of.takes_tokens()) part.input_width = width_of(of.input_width());
        if (!of.makes_losses()) part.output_width = width_of(of.output_width());
        check(outline_.parts.empty() ? part.takes_tokens()
                                     : part.input_width == outline_.parts.back().output_width,
              fmt::format("{} takes the stream of the part before", part.name));
        for (const PartParameter& parameter : of.parameters) {
            const int unit = add_parameter(parameter, numbered(parameter.unit, number), part);
            if (std::ranges::find(part.units, unit) == part.units.end()) {
                part.units.push_back(unit);
                outline_.units[static_cast<std::size_t>(unit)].parts.push_back(
                    static_cast<int>(outline_.parts.size()));
            }
            part.parameter_units.push_back(unit);
            outline_.units[static_cast<std::size_t>(unit)].sums_replicated.add(parameter.sums_of_unit);
        }
        const auto own = std::ranges::find_if(
            part.units, [&](int unit) { return outline_.unit(unit).class_of_layers >= 0; });
        part.own_unit = own != part.units.end() ? *own : part.units.empty() ? 0 : part.units.front();
        outline_.parts.push_back(std::move(part));
    }

    int add_parameter(const PartParameter& parameter, const std::string& unit,
                      const Outline::OutlinedPart& part) {
        const auto [found, is_new] = units_.emplace(unit, outline_.units_count());
        if (is_new)
            outline_.units.push_back(
                {.spec = {unit, {}},
                 .class_of_layers = part.is_layer() && !parameter.is_tied ? found->second : -1});
        Outline::OutlinedUnit& joined = outline_.units[static_cast<std::size_t>(found->second)];
        // Layers that are alike have units that are alike. A unit with other parts' parameters is not.
        const bool is_own_of_layer = part.is_layer() && !parameter.is_tied;
        if (is_own_of_layer != (joined.class_of_layers >= 0)) {
            programming_error(
                fmt::format("{}: {}.{} is in the unit of a layer; a parameter of a layer cannot be tied",
                            part.name, unit, parameter.spec.name));
        }
        std::vector<ParamSpec>& params = joined.spec.params;
        const auto same = std::ranges::find(params, parameter.spec.name, &ParamSpec::name);
        if (same == params.end()) {
            params.push_back(parameter.spec);
        } else if (!parameter.is_tied) {
            programming_error(fmt::format("{}: {}.{} is another part's, and not tied", part.name, unit,
                                          parameter.spec.name));
        } else if (*same != parameter.spec) {
            programming_error(fmt::format(
                "{}: {}.{} is tied to one of another shape {}, split, decay or initial values {}", part.name,
                unit, parameter.spec.name, to_string(same->shape), to_string(parameter.spec.shape)));
        }
        return found->second;
    }

    int kind_of(const Part& part) {
        auto& kinds = outline_.kinds;
        const auto found = std::ranges::find(kinds, part, &Outline::Kind::part);
        if (found != kinds.end()) return static_cast<int>(found - kinds.begin());
        Scratch scratch;
        const PartLists lists = derive_lists(part, {}, scratch);
        kinds.push_back({.part = part,
                         .keeps = !lists.kept.empty() && !part.makes_losses(),
                         .backward_reads_parameters = reads_parameters(lists.backward),
                         .splits_backward = !lists.backward_weight.empty(),
                         .split_number = lists.backward_weight.empty() ? -1 : outline_.split_kinds++});
        return static_cast<int>(kinds.size()) - 1;
    }

    int width_of(std::int64_t width) {
        const auto found = std::ranges::find(outline_.widths, width);
        const auto number = static_cast<int>(found - outline_.widths.begin());
        if (found == outline_.widths.end()) outline_.widths.push_back(width);
        return number;
    }

    Outline outline_;
    std::map<std::string, int> units_;
};

}  // namespace

std::string Model::Files::name_in_file(const std::string& full_name) const {
    const std::string name = without_nf4(full_name);
    if (const std::size_t place = name.find(lora_unit); is_of_adapter(name))
        return "base_model.model." + prefix + std::string(name).erase(place, lora_unit.size());
    return writes_prefix && name != head ? prefix + name : name;
}

std::int64_t Model::layers() const {
    std::int64_t layers = 0;
    for (const Run& run : runs) {
        if (run.is_layer) layers = saturated_sum(layers, saturated_product(run.count, std::ssize(run.parts)));
    }
    return layers;
}

namespace {

Work work_of(const Part& part) {
    Work sum;
    for (const Node& node : part.nodes) {
        const Work work = node.operation->work(part, node);
        sum.products += work.products;
        sum.pairs += work.pairs;
        sum.other += work.other;
    }
    return sum;
}

double products_cost(const Part& part) {
    const Work work = work_of(part);
    return work.products + work.pairs * static_cast<double>(part.tokens) / 2;
}

}  // namespace

double forward_cost(const Part& part) {
    const double products = products_cost(part);
    return products > 0 ? products : work_of(part).other;
}

namespace {

const ParamSpec& spec_of(const Part& part, int parameter) {
    return part.parameters[static_cast<std::size_t>(parameter)].spec;
}

// The products that would make the gradients of frozen matrices.
double frozen_cost(const Part& part) {
    double cost = 0;
    for (const Node& node : part.nodes) {
        if (!node.parameters.empty() && node.parameters[0] >= 0 &&
            spec_of(part, node.parameters[0]).is_frozen)
            cost += node.operation->work(part, node).products;
    }
    return cost;
}

}  // namespace

double backward_cost(const Part& part) {
    return has_backward(part) ? 2 * forward_cost(part) - frozen_cost(part) : 0;
}

double weight_cost(const Part& part) { return work_of(part).products - frozen_cost(part); }

double training_flops_per_token(const Model& model) {
    double flops = 0;
    for (const Model::Run& run : model.runs) {
        for (const Part& part : run.parts)
            flops += static_cast<double>(run.count) * (3 * products_cost(part) - frozen_cost(part));
    }
    return flops;
}

std::vector<Piece> shared_by_ranks(const Model& model) {
    std::vector<Piece> shared;
    for (const Model::Run& run : model.runs) {
        for (const Part& part : run.parts) {
            for (const Value& value : part.values) {
                std::vector<Piece> pieces = value.pieces;
                if (pieces.empty() && value.placement == Placement::divided)
                    pieces = {{value.shape[value.divided_dim], "parts of " + value.name}};
                // A saturated count is no size; the memory check refuses such a model.
                std::ranges::copy_if(pieces, std::back_inserter(shared), [](const Piece& piece) {
                    return piece.count < std::numeric_limits<std::int64_t>::max();
                });
            }
        }
    }
    return shared;
}

WorkspaceRequest workspace_request(const Model& model, const PartSizes& sizes) {
    WorkspaceRequest request{.batch = sizes.batch,
                             .sequence = model.sequence_length,
                             .channels = 1,
                             .heads = 1,
                             .largest_matmul_channels = 1,
                             .head_rows = sizes.logits_rows,
                             .dtype = sizes.dtype,
                             .vocabulary = 1,
                             .head_size = 1};
    for (const Model::Run& run : model.runs) {
        for (const Part& part : run.parts) {
            for (const Node& node : part.nodes) {
                if (node.operation->workspace) node.operation->workspace(part, node, sizes, request);
            }
        }
    }
    return request;
}

namespace {

// The sum of f(parameter) over all parameters; shared ones count once.
template <class F>
double sum_over_parameters(const Model& model, const F& f) {
    double sum = 0;
    std::set<std::string> shared;
    for (const Model::Run& run : model.runs) {
        for (const Part& part : run.parts) {
            for (const PartParameter& parameter : part.parameters) {
                const bool is_of_each = parameter.unit.find("{}") != std::string::npos;
                if (!is_of_each && !shared.insert(parameter.unit + "." + parameter.spec.name).second)
                    continue;
                sum += static_cast<double>(is_of_each ? run.count : 1) * f(parameter.spec);
            }
        }
    }
    return sum;
}

}  // namespace

double parameters_about(const Model& model, bool trained) {
    return sum_over_parameters(model, [&](const ParamSpec& spec) {
        return trained && spec.is_frozen ? 0 : static_cast<double>(spec.shape.elements());
    });
}

double parameter_bytes_about(const Model& model, DType compute) {
    return sum_over_parameters(model, [&](const ParamSpec& spec) {
        constexpr double in_4_bits = static_cast<double>(nf4_block_bytes) / static_cast<double>(nf4_block);
        return static_cast<double>(spec.shape.elements()) *
               (spec.is_nf4 ? in_4_bits : static_cast<double>(size_of(compute)));
    });
}

std::string parameters_text(const Model& model) {
    const std::int64_t all = count_parameters(model), trained = count_parameters(model, true);
    return trained == all ? grouped(all) : fmt::format("{} trained, of {}", grouped(trained), grouped(all));
}

std::span<const int> Outline::users(int unit, int first_part, int end_part) const {
    const std::vector<int>& all = this->unit(unit).parts;
    const auto first = std::ranges::lower_bound(all, first_part);
    return {first, std::max(first, std::ranges::lower_bound(all, end_part))};
}

Outline outline_of(const Model& model) { return Outlining().run(model); }

std::vector<std::int64_t> first_amax(const Outline& outline) {
    std::vector<std::int64_t> first = {0};
    for (const Outline::OutlinedPart& part : outline.parts)
        first.push_back(first.back() + fp8_operands * fp8_products(outline.kind_of(part).part));
    return first;
}

ModelLists derive_lists(const Outline& outline, const PartSizes& sizes) {
    ModelLists lists;
    for (const Outline::Kind& kind : outline.kinds) {
        lists.kinds.push_back(derive_lists(kind.part, sizes, lists.scratch));
        check_lists(lists.kinds.back());
    }
    return lists;
}

}  // namespace llmc
