#include "llmc/plan/step_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/plan/whole_pipeline.h"

namespace llmc {

namespace {

double elements(const ListOperand& operand) { return static_cast<double>(operand.shape.elements()); }
bool is_used(const ListOperand& operand) {
    return operand.space != Space::none && operand.access != Access::shape;
}

// The share of a GPU's multiprocessors that a product (rows, columns) keeps busy, in tiles of 128 x 256.
double tile_efficiency(double rows, double columns, int multiprocessors) {
    if (multiprocessors == 0) return 1;
    const double tiles = std::ceil(rows / 128) * std::ceil(columns / 256);
    return tiles / (std::ceil(tiles / multiprocessors) * multiprocessors);
}

// A product (rows, inner) x (inner, columns) at `rate` FLOP/s, without its memory.
double product_seconds(double rows, double inner, double columns, double rate, int multiprocessors) {
    return 2 * rows * inner * columns / (rate * tile_efficiency(rows, columns, multiprocessors));
}

// dout (rows, outputs), weight (outputs, inputs): the gradients that the call computes.
double product_gradient_seconds(bool of_input, bool of_weight, double rows, double outputs, double inputs,
                                double rate, int multiprocessors) {
    return (of_input ? product_seconds(rows, outputs, inputs, rate, multiprocessors) : 0) +
           (of_weight ? product_seconds(outputs, rows, inputs, rate, multiprocessors) : 0);
}

// out (B,T,H,D) of causal attention; half of the pairs are seen. The backward pass has five products in place of two.
double attention_seconds(const ListOperand& out, const Node& node, bool is_backward, const StepRates& rates) {
    const auto T = static_cast<double>(out.shape[1]);
    const std::int64_t window = node.sizes.empty() ? 0 : node.sizes.back();
    const double keys = window > 0 && static_cast<double>(window) < T ? static_cast<double>(window) : T / 2;
    return (is_backward ? 2.5 : 1) * 4 * elements(out) * keys / rates.attention;
}

// The links of a group of `size` ranks, `distance` apart.
struct GroupLinks {
    int on_node, nodes;
};
GroupLinks links_of(int size, int distance, int ranks_of_node) {
    const int on_node = std::clamp(ranks_of_node / std::max(1, distance), 1, size);
    return {on_node, (size + on_node - 1) / on_node};
}

}  // namespace

// On k nodes of g ranks, the node's links carry
// (g-1)/g of them, and each network card (k-1)/k of a g-th. The two overlap in part: between the larger one and
// their sum.
double gather_seconds(double whole, int size, int distance, const StepRates& rates) {
    if (size == 1) return 0;
    const auto [g, k] = links_of(size, distance, rates.ranks_of_node);
    const double inside = whole * (g - 1) / g / rates.node.bytes,
                 across = whole / g * (k - 1) / k / rates.network.bytes;
    const double latency = (g - 1) * rates.node.latency + (k - 1) * rates.network.latency;
    return std::max(inside, across) + (rates.is_bound ? 0 : std::min(inside, across) / 2 + latency);
}

double call_seconds(const ListCall& call, const Mesh& mesh, const StepRates& rates) {
    double bytes = 0;
    for (const ListOperand& operand : call.operands)
        if (is_used(operand)) bytes += elements(operand) * static_cast<double>(size_of(operand.dtype));
    double arithmetic = 0;
    const auto& o = call.operands;
    const auto width = [](const ListOperand& operand) { return static_cast<double>(operand.shape.last()); };
    const int multiprocessors = rates.multiprocessors;
    if (call.name == "matmul_forward" || call.name == "fp8_matmul_forward") {
        const bool is_fp8 = call.name == "fp8_matmul_forward";
        const ListOperand& weight = o[is_fp8 ? 3 : 2];
        arithmetic = product_seconds(elements(o[0]) / width(o[0]), width(weight), width(o[0]),
                                     is_fp8 ? rates.fp8_products : rates.products, multiprocessors);
    } else if (call.name == "matmul_backward") {
        const ListOperand& weight = is_used(o[1]) ? o[1] : o[5];
        arithmetic = product_gradient_seconds(is_used(o[0]), is_used(o[1]), elements(o[3]) / width(o[3]),
                                              width(o[3]), width(weight), rates.products, multiprocessors);
    } else if (call.name == "fp8_matmul_backward") {
        // dout (rows, outputs) and its transpose, the transposes of the input (inputs, rows) and of the weight
        if (is_used(o[0]))
            arithmetic += product_seconds(elements(o[0]) / width(o[0]), width(o[2]), width(o[0]),
                                          rates.fp8_products, multiprocessors);
        if (is_used(o[1]))
            arithmetic += product_seconds(elements(o[1]) / width(o[1]), width(o[3]), width(o[1]),
                                          rates.fp8_products, multiprocessors);
    } else if (call.name == "losses" || call.name == "losses and gradients") {
        // losses (N), the table (V,C): a product, and the gradients of its rows and of the table.
        const double N = elements(o[0]), V = static_cast<double>(o[3].shape[0]),
                     C = static_cast<double>(o[3].shape.last());
        arithmetic = product_seconds(N, C, V, rates.products, multiprocessors);
        bytes += 4 * N * V * static_cast<double>(size_of(o[2].dtype));  // logits, written and read twice
        if (call.name == "losses and gradients")
            arithmetic += product_gradient_seconds(true, true, N, V, C, rates.products, multiprocessors);
    } else if (call.name == "attention_forward") {
        arithmetic = attention_seconds(o[0], *call.node, false, rates);
    } else if (call.name == "attention_backward") {
        const auto most = std::ranges::max_element(o, {}, [](const ListOperand& operand) {
            return operand.shape.dimensions() == 4 ? operand.shape.elements() : 0;
        });
        arithmetic = attention_seconds(*most, *call.node, true, rates);
    }
    double seconds = std::max({arithmetic, bytes / rates.memory, rates.launch});
    // An exchange waits: what it computes and what it sends come one after the other.
    if (call.sent > 0) {
        const bool sums = call.name == "all_reduce";
        const double whole =
            static_cast<double>(call.sent) * mesh.tensor / (mesh.tensor - 1) / (sums ? 2 : 1);
        const double sent = gather_seconds(whole, mesh.tensor, 1, rates) * (sums ? 2 : 1);
        const bool only_sends = arithmetic == 0;
        seconds = only_sends ? std::max(sent, rates.launch) : seconds + sent;
    }
    return seconds;
}

namespace {

// The durations of a stage's actions.
class ActionTimes {
  public:
    ActionTimes(const RunPlan& plan, const StepRates& rates) : plan_(plan), rates_(rates) {}

    double operator()(const Action& action) {
        const Mesh& mesh = plan_.spec.mesh;
        const Sharding& sharding = mesh.sharding;
        switch (action.kind) {
            case ActionKind::forward:
            case ActionKind::recompute:
            case ActionKind::backward:
            case ActionKind::backward_input:
            case ActionKind::backward_weight:
                return part_seconds(action);
            case ActionKind::send_activation:
            case ActionKind::send_gradient:
            case ActionKind::receive_activation:
            case ActionKind::receive_gradient:
                return transfer_seconds();
            default:
                break;
        }
        if (action.unit < 0) return rates_.launch;
        const UnitLayout& unit = plan_.store.units[static_cast<std::size_t>(action.unit)];
        const auto elements = static_cast<double>(unit.padded_elements(mesh.data_ranks()));
        const double parameters = elements * static_cast<double>(size_of(plan_.spec.dtype)),
                     gradients = elements * static_cast<double>(size_of(plan_.spec.gradient_dtype));
        const double held = sharding.keeps_optimizer_whole() ? elements : elements / sharding.shards;
        const auto seconds_at = [&](double bytes, double rate) { return rate > 0 ? bytes / rate : 0; };
        const auto moved = [&] {
            return static_cast<double>(bytes_moved(action, plan_.store, plan_.memory));
        };
        switch (action.kind) {
            case ActionKind::upload_parameters:
            case ActionKind::download_parameters:
            case ActionKind::upload_gradients:
            case ActionKind::download_gradients:
                return seconds_at(moved(), rates_.host_link);
            case ActionKind::read_state:
            case ActionKind::read_parameters:
                return seconds_at(moved(), rates_.disk_read);
            case ActionKind::write_state:
            case ActionKind::write_parameters:
                return seconds_at(moved(), rates_.disk_write);
            case ActionKind::gather_parameters:
                return gather_seconds(parameters, sharding.shards, mesh.tensor, rates_);
            case ActionKind::reduce_scatter:
            case ActionKind::gather_gradients:
                return gather_seconds(gradients, sharding.shards, mesh.tensor, rates_);
            case ActionKind::all_reduce:
                return 2 * gather_seconds(gradients / sharding.shards, sharding.replicas,
                                          mesh.tensor * sharding.shards, rates_);
            case ActionKind::sum_tied:
                return 2 * gather_seconds(gradients / sharding.shards, 2, mesh.tensor * mesh.data_ranks(),
                                          rates_);
            case ActionKind::update: {
                // Gradients are read; moments and weights are read and written; parameters are written.
                const DType moments_dtype = plan_.store.dtypes.moments_of(plan_.outline->unit(action.unit));
                const double moments = 4 * static_cast<double>(size_of(moments_dtype)),
                             weights = plan_.spec.has_master ? 10 : 4;
                const double pieces =
                    action.piece < 0 ? 1
                                     : static_cast<double>(
                                           plan_.store.pieces[static_cast<std::size_t>(action.unit)].size());
                const double bytes = held * (4 + moments + weights) / pieces;
                return action.stream == StreamKind::host ? seconds_at(bytes, rates_.host_memory)
                                                         : std::max(rates_.launch, bytes / rates_.memory);
            }
            case ActionKind::zero:
            case ActionKind::round:
            case ActionKind::accumulate:
            case ActionKind::square:  // of one unit
                return std::max(rates_.launch, gradients / rates_.memory);
            default:
                return rates_.launch;
        }
    }

  private:
    double part_seconds(const Action& action) {
        const RecomputeKind kind = recompute_of(*plan_.outline, plan_.spec.recompute, action.part);
        const auto [found, is_new] =
            known_.try_emplace({plan_.outline->part(action.part).kind, action.kind, kind});
        if (!is_new) return found->second;
        const PartLists& lists = plan_.lists->of(plan_.outline->part(action.part));
        const List& list = action.kind == ActionKind::forward          ? lists.forward
                           : action.kind == ActionKind::recompute      ? lists.recompute_of(kind)
                           : action.kind == ActionKind::backward       ? lists.backward
                           : action.kind == ActionKind::backward_input ? lists.backward_input
                                                                       : lists.backward_weight;
        for (const ListCall& call : list) found->second += call_seconds(call, plan_.spec.mesh, rates_);
        return found->second;
    }
    double transfer_seconds() const {
        const Mesh& mesh = plan_.spec.mesh;
        const PartSizes& sizes = plan_.lists->kinds.front().sizes;
        const auto bytes =
            static_cast<double>(sizes.batch * sizes.split.tokens(plan_.spec.model.sequence_length) *
                                plan_.outline->widths.front()) *
            static_cast<double>(size_of(sizes.dtype));
        const bool is_on_node = mesh.world() <= rates_.ranks_of_node;
        const LinkRate& link = is_on_node ? rates_.node : rates_.network;
        return bytes / link.bytes + (rates_.is_bound ? 0 : link.latency);
    }

    const RunPlan& plan_;
    const StepRates& rates_;
    std::map<std::tuple<int, ActionKind, RecomputeKind>, double> known_;
};

// Runs the lists of all stages: an action begins when its stream is free and the actions that it waits for are done;
// a transfer when both stages have come to it.
class Simulation {
  public:
    Simulation(std::span<const RunPlan> stages, const StepRates& rates) : stages_(stages) {
        for (const RunPlan& stage : stages) {
            ActionTimes time(stage, rates);
            Lane& lane = lanes_.emplace_back();
            for (const Action& action : stage.training.actions) {
                lane.durations.push_back(time(action));
                if (action.stream == StreamKind::compute) lane.compute += lane.durations.back();
            }
            lane.ends.assign(lane.durations.size(), -1);
            for (std::size_t i = 0; i < lane.durations.size(); ++i)
                lane.streams[static_cast<std::size_t>(stage.training.actions[i].stream)].push_back(i);
        }
    }

    // When each stream of each stage ends, and how long the stage computes.
    struct Ends {
        std::vector<double> streams;
        double compute = 0;
    };
    Ends run() {
        for (bool moved = true; moved;) {
            moved = false;
            for (std::size_t stage = 0; stage < lanes_.size(); ++stage) {
                for (std::size_t stream = 0; stream < all_streams.size(); ++stream)
                    while (step(stage, stream)) moved = true;
            }
        }
        Ends ends;
        for (const Lane& lane : lanes_) {
            check(std::ranges::count(lane.ends, -1.0) == 0, "the lists of a step run to their end");
            ends.streams.insert(ends.streams.end(), lane.free.begin(), lane.free.end());
            ends.compute = std::max(ends.compute, lane.compute);
        }
        return ends;
    }

  private:
    struct Lane {
        std::vector<double> durations, ends;
        std::array<std::vector<std::size_t>, all_streams.size()> streams;
        std::array<std::size_t, all_streams.size()> next{};
        std::array<double, all_streams.size()> free{};
        double compute = 0;
    };

    // Runs the next action of a stream, if it can run.
    bool step(std::size_t stage, std::size_t stream) {
        Lane& lane = lanes_[stage];
        if (lane.next[stream] == lane.streams[stream].size()) return false;
        const std::size_t number = lane.streams[stream][lane.next[stream]];
        const Action& action = stages_[stage].training.actions[number];
        double begin = lane.free[stream];
        for (const int earlier : action.after) {
            const double end = lane.ends[static_cast<std::size_t>(earlier)];
            if (end < 0) return false;
            begin = std::max(begin, end);
        }
        if (const auto sent = source_of(stage, action)) {
            const auto found = sends_.find(*sent);
            if (found == sends_.end()) return false;
            begin = std::max(begin, found->second);
        }
        if (action.kind == ActionKind::send_activation || action.kind == ActionKind::send_gradient)
            sends_[key_of(stage, action)] = begin;
        lane.ends[number] = lane.free[stream] = begin + lane.durations[number];
        ++lane.next[stream];
        return true;
    }

    // Whether it is an activation, the chunk in the whole model that sends it, and the micro-batch.
    using Sent = std::tuple<bool, int, int>;
    Sent key_of(std::size_t stage, const Action& action) const {
        const int chunk = action.chunk * static_cast<int>(stages_.size()) + static_cast<int>(stage);
        return {action.kind == ActionKind::send_activation, chunk, action.micro_batch};
    }
    std::optional<Sent> source_of(std::size_t stage, const Action& action) const {
        const int chunk = action.chunk * static_cast<int>(stages_.size()) + static_cast<int>(stage);
        if (action.kind == ActionKind::receive_activation) return Sent{true, chunk - 1, action.micro_batch};
        if (action.kind == ActionKind::receive_gradient) return Sent{false, chunk + 1, action.micro_batch};
        return std::nullopt;
    }

    std::span<const RunPlan> stages_;
    std::vector<Lane> lanes_;
    std::map<Sent, double> sends_;  // when each begins
};

}  // namespace

ModelTime model_time(const RunSpec& spec, const DeviceSizes& sizes, const StepRates& rates) {
    const ShortPlans plans = short_plans(spec, sizes, 0, spec.rank_sequences());
    const RunPlan& plan = plans.first.front();
    ActionTimes seconds(plan, rates);
    ModelTime time{.activation_bytes = plan.memory.bytes(ArenaKind::activations)};
    for (const Action& action : plan.training.actions) {
        if (action.kind == ActionKind::forward) time.forward += seconds(action);
        if (action.kind == ActionKind::recompute || action.kind == ActionKind::backward)
            time.backward += seconds(action);
    }
    return time;
}

// Further micro-batches make each stream end later by as much as the last ones do, which others may hide in a short
// step: a disk works once a step. Computing may hide behind a link there, which breadth-first does not carry more for
// more micro-batches.
StepTime step_time(const ShortPlans& plans, const StepRates& rates) {
    const Simulation::Ends first = Simulation(plans.first, rates).run(),
                           longer = plans.more == 0 ? first : Simulation(plans.second, rates).run();
    const auto more = static_cast<double>(plans.more);
    StepTime time{.compute = first.compute + more * (longer.compute - first.compute)};
    time.seconds = time.compute;
    for (std::size_t i = 0; i < first.streams.size(); ++i)
        time.seconds =
            std::max(time.seconds, first.streams[i] + more * (longer.streams[i] - first.streams[i]));
    return time;
}

}  // namespace llmc
