#include "llmc/plan/step_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/device/counting_ops.h"
#include "llmc/parallel/step/orthogonal.h"
#include "llmc/plan/whole_pipeline.h"

namespace llmc {

std::string_view name_of(TimePart part) {
    return name_among(part, "products", "attention", "other operations", "tensor exchanges", "recomputation",
                      "update", "waits for data exchanges", "waits for other stages", "waits for the host",
                      "waits for disks");
}

namespace {

TimeParts& operator+=(TimeParts& sum, const TimeParts& time) {
    for (std::size_t i = 0; i < time_parts; ++i) sum.of[i] += time.of[i];
    return sum;
}

// The share of a GPU's multiprocessors that a product (rows, columns) keeps busy, in tiles of 128 x 256.
double tile_efficiency(double rows, double columns, int multiprocessors) {
    if (multiprocessors == 0) return 1;
    const double tiles = std::ceil(rows / 128) * std::ceil(columns / 256);
    return tiles / (std::ceil(tiles / multiprocessors) * multiprocessors);
}

// A product at `rate` FLOP/s, without its memory.
double product_seconds(const ProductSizes& p, double rate, int multiprocessors) {
    return p.flops() / (rate * tile_efficiency(p.rows, p.columns, multiprocessors));
}

// An operation on a GPU, whose arithmetic or memory takes longest.
void add_operation(TimeParts& time, const OpCost& cost, const StepRates& rates) {
    double arithmetic = 0;
    for (const ProductSizes& p : cost.products) {
        const double rate = cost.dtype == DType::uint8 ? rates.fp8_products : rates.products;
        if (p.rows > 0) arithmetic += product_seconds(p, rate, rates.multiprocessors);
    }
    if (cost.arithmetic == Arithmetic::attention) arithmetic = cost.flops / rates.attention;
    const TimePart part = cost.arithmetic == Arithmetic::products    ? TimePart::products
                          : cost.arithmetic == Arithmetic::attention ? TimePart::attention
                                                                     : TimePart::other;
    time[part] += rates.times[part] * std::max({arithmetic, cost.bytes / rates.memory, rates.launch});
}

// The links of a group of `size` ranks, `distance` apart.
struct GroupLinks {
    int on_node, nodes;
};
GroupLinks links_of(int size, int distance, int ranks_of_node) {
    int on_node = std::clamp(ranks_of_node / std::max(1, distance), 1, size);
    // Some of the groups that would fit into a node lie on two.
    if (on_node == size && ranks_of_node % (size * distance) != 0) on_node = std::max(1, size - 1);
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

TimeParts call_time(const ListCall& call, const PartSizes& sizes, const Mesh& mesh, const StepRates& rates) {
    CountingOps ops;
    PartMemory memory;
    memory.one.fill(marked_address(1));
    run_call(call, memory, sizes.batch,
             {.ops = ops,
              .ranks = TensorParallel::silent(sizes.split.ranks),
              .node = nullptr,
              .loss_scale = 1,
              .rows = {},
              .records_amax = true});
    TimeParts time;
    // An exchange waits: what it computes and what it sends come one after the other.
    if (call.sent > 0) {
        const bool sums = call.name == "all_reduce";
        const double whole =
            static_cast<double>(call.sent) * mesh.tensor / (mesh.tensor - 1) / (sums ? 2 : 1);
        time[TimePart::tensor_exchange] =
            std::max(gather_seconds(whole, mesh.tensor, 1, rates) * (sums ? 2 : 1), rates.launch);
    }
    for (const CountingOps::Counted& counted : ops.counted) add_operation(time, counted.cost, rates);
    return time;
}

namespace {

// The part of a step to which an action belongs that is no pass. If the compute stream waits for it, it waits for that.
TimePart part_of(StreamKind stream) {
    switch (stream) {
        case StreamKind::compute:
            return TimePart::update;
        case StreamKind::communication:
            return TimePart::data_exchange;
        case StreamKind::activations_in:
        case StreamKind::activations_out:
        case StreamKind::gradients_in:
        case StreamKind::gradients_out:
            return TimePart::stages;
        case StreamKind::copy:
        case StreamKind::to_device:
        case StreamKind::from_device:
        case StreamKind::host:
            return TimePart::host;
        case StreamKind::disk_in:
        case StreamKind::disk_out:
            return TimePart::disk;
    }
    return TimePart::host;
}

// The directions' buffers for operations that are only counted.
DirectionBuffers<Tensor> counted(const DirectionBuffers<BufferId>& ids, const MemoryLayout& memory) {
    const auto tensor = [&](const BufferId& id) {
        const MemoryLayout::Buffer& buffer = memory.buffers()[static_cast<std::size_t>(id.index)];
        return Tensor{marked_address(1), buffer.dtype, buffer.shape};
    };
    return {tensor(ids.directions), tensor(ids.own_on_host), tensor(ids.matrix),   tensor(ids.product),
            tensor(ids.square),     tensor(ids.squared),     tensor(ids.partials), tensor(ids.norm)};
}

// The durations of a stage's actions.
class ActionTimes {
  public:
    ActionTimes(const RunPlan& plan, const StepRates& rates) : plan_(plan), rates_(rates) {}

    TimeParts operator()(const Action& action) {
        TimeParts time;
        switch (action.kind) {
            case ActionKind::forward:
            case ActionKind::backward:
            case ActionKind::backward_input:
            case ActionKind::backward_weight:
                return pass_time(action);
            case ActionKind::orthogonalise:
                return orthogonalise_time(action.unit);
            case ActionKind::recompute:
                time[TimePart::recompute] = pass_time(action).total();
                return time;
            default:
                const TimePart part = part_of(action.stream);
                time[part] = rates_.times[part] * seconds_of(action);
                return time;
        }
    }

  private:
    // The seconds of an action that is no pass.
    double seconds_of(const Action& action) {
        const Mesh& mesh = plan_.spec.mesh;
        const Sharding& sharding = mesh.sharding;
        switch (action.kind) {
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
        const auto parameters = static_cast<double>(
            stored_parameters(unit.spec(), unit.padded_elements(mesh.data_ranks()), plan_.spec.dtype)
                .bytes());
        const double gradients = elements * static_cast<double>(size_of(plan_.spec.gradient_dtype));
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
            case ActionKind::upload_directions:
            case ActionKind::download_directions:
                return seconds_at(moved(), rates_.host_link);
            case ActionKind::gather_directions: {
                const double directions =
                    elements * static_cast<double>(size_of(plan_.store.dtypes.of_directions()));
                return (sharding.keeps_optimizer_whole()
                            ? 0
                            : gather_seconds(directions, sharding.shards, mesh.tensor, rates_)) +
                       gather_seconds(mesh.tensor * directions, mesh.tensor, 1, rates_);
            }
            case ActionKind::momentum: {
                // Gradients are read, momentum is read and written, directions are written.
                const double bytes =
                    held * (4 + 2 * static_cast<double>(size_of(plan_.store.dtypes.moments)) +
                            static_cast<double>(size_of(plan_.store.dtypes.of_directions())));
                return action.stream == StreamKind::host ? seconds_at(bytes, rates_.host_memory)
                                                         : std::max(rates_.launch, bytes / rates_.memory);
            }
            case ActionKind::update: {
                // Gradients are read; moments and weights are read and written; parameters are written.
                const DType moments_dtype = plan_.store.dtypes.moments_of(plan_.outline->unit(action.unit));
                const bool is_direction =  // its momentum is updated before
                    plan_.store.dtypes.has_directions(plan_.outline->unit(action.unit));
                const double moments = is_direction ? 0
                                                    : 2 * plan_.store.dtypes.states() *
                                                          static_cast<double>(size_of(moments_dtype)),
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

    // Of the rank that has shares of the most work.
    const TimeParts& orthogonalise_time(int number) {
        const Outline::OutlinedUnit& outlined = plan_.outline->unit(number);
        const auto [found, is_new] = of_class_.try_emplace(outlined.class_of_layers);
        if (!is_new) return found->second;
        const Sharding& sharding = plan_.spec.mesh.sharding;
        const UnitLayout& unit = plan_.store.units[static_cast<std::size_t>(number)];
        const std::int64_t elements = unit.padded_elements(sharding.ranks()),
                           shards = sharding.keeps_optimizer_whole() ? 1 : sharding.shards;
        for (std::int64_t shard = 0; shard < shards; ++shard) {
            CountingOps ops;
            orthogonalise(
                ops, unit, elements, {shard * elements / shards, (shard + 1) * elements / shards},
                [&](const ParamSpec& spec) { return plan_.store.dtypes.has_directions(outlined, spec); },
                counted(*plan_.store.directions, plan_.memory));
            TimeParts time;
            for (const CountingOps::Counted& operation : ops.counted)
                add_operation(time, operation.cost, rates_);
            if (time.total() > found->second.total()) found->second = time;
        }
        return found->second;
    }

    TimeParts pass_time(const Action& action) {
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
        TimeParts& time = found->second;
        for (const ListCall& call : list) time += call_time(call, lists.sizes, plan_.spec.mesh, rates_);
        // Operations hide at most as much of the exchanges as they take themselves.
        double& exchange = time[TimePart::tensor_exchange];
        exchange = std::max(rates_.times[TimePart::tensor_exchange] * exchange,
                            exchange - (time.total() - exchange));
        return time;
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
    std::map<std::tuple<int, ActionKind, RecomputeKind>, TimeParts> known_;
    std::map<int, TimeParts> of_class_;  // of orthogonalise, by the class of layers
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
                const TimeParts taken = time(action);
                lane.durations.push_back(taken.total());
                if (action.stream == StreamKind::compute) lane.parts += taken;
            }
            lane.ends.assign(lane.durations.size(), -1);
            lane.causes.assign(lane.durations.size(), nothing);
            for (std::size_t i = 0; i < lane.durations.size(); ++i)
                lane.streams[static_cast<std::size_t>(stage.training.actions[i].stream)].push_back(i);
        }
    }

    // When each stream of each stage ends, and what each stage computes.
    struct Ends {
        std::vector<double> streams;
        std::vector<TimeParts> parts;
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
            ends.parts.push_back(lane.parts);
        }
        return ends;
    }

    // After run(): adds what a stage's compute stream waits for until the step ends.
    void add_waits(std::size_t stage, TimeParts& parts) const {
        const Lane& lane = lanes_[stage];
        const auto& computed = lane.streams[static_cast<std::size_t>(StreamKind::compute)];
        double end = 0;
        for (const std::size_t number : computed) {
            add_wait(lane, end, lane.ends[number] - lane.durations[number], lane.causes[number], parts);
            end = lane.ends[number];
        }
        // Then it waits for its own streams, and for other stages.
        const double own = std::ranges::max(lane.free);
        for (const auto& stream : lane.streams)
            if (own > end && !stream.empty() && lane.ends[stream.back()] == own) {
                add_wait(lane, end, own, static_cast<int>(stream.back()), parts);
                break;
            }
        double last = own;
        for (const Lane& other : lanes_) last = std::max(last, std::ranges::max(other.free));
        parts[TimePart::stages] += last - std::max(own, end);
    }

  private:
    static constexpr int nothing = -1;
    struct Lane {
        std::vector<double> durations, ends;
        std::vector<int> causes;  // the action of this stage for whose end each waited longest, or nothing
        std::array<std::vector<std::size_t>, all_streams.size()> streams;
        std::array<std::size_t, all_streams.size()> next{};
        std::array<double, all_streams.size()> free{};
        TimeParts parts;  // of what the stage computes
    };

    // The time from `begin` to `end` in which a lane waits for the action `cause`, and for what that waited for.
    void add_wait(const Lane& lane, double begin, double end, int cause, TimeParts& parts) const {
        const std::vector<Action>& actions =
            stages_[static_cast<std::size_t>(&lane - lanes_.data())].training.actions;
        while (begin < end && cause != nothing) {
            const auto number = static_cast<std::size_t>(cause);
            const double began = std::max(begin, lane.ends[number] - lane.durations[number]);
            if (began < end) {
                parts[part_of(actions[number].stream)] += end - began;
                end = began;
            }
            cause = lane.causes[number];
        }
        if (begin < end) parts[TimePart::stages] += end - begin;  // another stage computes
    }

    // Runs the next action of a stream, if it can run.
    bool step(std::size_t stage, std::size_t stream) {
        Lane& lane = lanes_[stage];
        if (lane.next[stream] == lane.streams[stream].size()) return false;
        const std::size_t number = lane.streams[stream][lane.next[stream]];
        const Action& action = stages_[stage].training.actions[number];
        double begin = lane.free[stream];
        int cause =
            lane.next[stream] == 0 ? nothing : static_cast<int>(lane.streams[stream][lane.next[stream] - 1]);
        for (const int earlier : action.after) {
            const double end = lane.ends[static_cast<std::size_t>(earlier)];
            if (end < 0) return false;
            if (end > begin) {
                begin = end;
                cause = earlier;
            }
        }
        if (const auto sent = source_of(stage, action)) {
            const auto found = sends_.find(*sent);
            if (found == sends_.end()) return false;
            if (found->second > begin) {
                begin = found->second;
                cause = nothing;
            }
        }
        if (action.kind == ActionKind::send_activation || action.kind == ActionKind::send_gradient)
            sends_[key_of(stage, action)] = begin;
        lane.ends[number] = lane.free[stream] = begin + lane.durations[number];
        lane.causes[number] = cause;
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
        if (action.kind == ActionKind::forward) time.forward += seconds(action).total();
        if (action.kind == ActionKind::recompute || action.kind == ActionKind::backward)
            time.backward += seconds(action).total();
    }
    return time;
}

// Further micro-batches make each stream end later by as much as the last ones do, which others may hide in a short
// step: a disk works once a step. Computing may hide behind a link there, which breadth-first does not carry more for
// more micro-batches.
StepTime step_time(const ShortPlans& plans, const StepRates& rates) {
    Simulation few(plans.first, rates), many(plans.more == 0 ? plans.first : plans.second, rates);
    Simulation::Ends first = few.run(), longer = plans.more == 0 ? first : many.run();
    const auto more = static_cast<double>(plans.more);
    const auto at_length = [&](double a, double b) { return a + more * (b - a); };
    const auto parts_of = [&](std::size_t stage) {
        TimeParts parts;
        for (std::size_t i = 0; i < time_parts; ++i)
            parts.of[i] = at_length(first.parts[stage].of[i], longer.parts[stage].of[i]);
        return parts;
    };
    StepTime time;
    std::size_t slowest = 0;
    for (std::size_t stage = 0; stage < first.parts.size(); ++stage) {
        const double compute = parts_of(stage).total();
        if (compute > time.compute) {
            time.compute = compute;
            slowest = stage;
        }
    }
    time.seconds = time.compute;
    for (std::size_t i = 0; i < first.streams.size(); ++i)
        time.seconds = std::max(time.seconds, at_length(first.streams[i], longer.streams[i]));
    // The waits of both steps say which share of all waiting is for what.
    time.parts = parts_of(slowest);
    TimeParts waits, waits_of_more;
    few.add_waits(slowest, waits);
    if (plans.more > 0) many.add_waits(slowest, waits_of_more);
    for (std::size_t i = 0; i < time_parts; ++i)
        waits.of[i] =
            plans.more == 0 ? waits.of[i] : std::max(0.0, at_length(waits.of[i], waits_of_more.of[i]));
    const double waited = time.seconds - time.compute, all = waits.total();
    // Both are sums of the same times, thousands at most, in another order: each is within so many times 2^-53.
    const double rounding = 1e-12 * time.seconds;
    if (waited > rounding && all == 0) time.parts[TimePart::stages] += waited;
    for (std::size_t i = 0; i < time_parts && all > 0; ++i) time.parts.of[i] += waits.of[i] * waited / all;
    return time;
}

}  // namespace llmc
