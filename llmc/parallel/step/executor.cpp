// Runs lists of actions. executor_actions.cpp performs an action, and executor_units.cpp those on units.
#include "llmc/parallel/step/executor.h"

#include <algorithm>
#include <cstring>

#include "llmc/core/error.h"
#include "llmc/device/nf4.h"

namespace llmc {

namespace {

std::vector<std::byte*> first_bytes(const std::vector<Tensor>& tensors) {
    std::vector<std::byte*> bytes;
    for (const Tensor& tensor : tensors) bytes.push_back(tensor.data);
    return bytes;
}

}  // namespace

Executor::Executor(const ModelLists& lists, Device& device, const MeshGroups& groups,
                   const ParameterStore& store, const ActivationBuffers<Tensor>& activations,
                   int micro_batches, bool overlap)
    : lists_(lists),
      device_(device),
      ops_(device.ops()),
      updates_on_host_(store.sharding().offload.updates_on_host()),
      groups_(groups),
      ranks_(groups.tensor_parallel()),
      store_(store),
      activations_(activations),
      feed_(device, activations.tokens, micro_batches),
      scratch_(first_bytes(activations.scratch)),
      angles_(first_bytes(activations.angles)),
      losses_(first_bytes(activations.losses)),
      // On the CPU, tensor-parallel collectives run on the compute thread and cannot overlap with it.
      streams_(make_step_streams(device, overlap && (device.streams() || !ranks_.is_shared()))) {
    for (const SlotBuffers<Tensor>& slot : activations_.slots) {
        auto& kept = kept_.emplace_back();
        for (const std::vector<Tensor>& of_part : slot.kept) kept.push_back(first_bytes(of_part));
    }
    for (const std::vector<Tensor>& of_part : activations_.output_gradients)
        output_gradients_.push_back(first_bytes(of_part));
    for (std::size_t i = 0; i < activations_.angles.size(); ++i) {
        const Tensor& table = activations_.angles[i];
        std::vector<float> values(static_cast<std::size_t>(table.elements()));
        fill_angles(values, lists.scratch.angles[i]);
        device.upload(table, values.data());
    }
    if (activations_.amax.elements() > 0) staged_amax_ = device.host_memory(scaling_amax().bytes());
    parameters_.resize(outline().parts.size());
    for (const Chunk& chunk : store.part().chunks) {
        for (int part = chunk.first_part; part < chunk.end_part; ++part)
            parameters_[static_cast<std::size_t>(part)] = places_of(part);
    }
}

Executor::ParameterPlaces Executor::places_of(int number) const {
    const Outline::OutlinedPart& part = outline().part(number);
    const std::vector<PartParameter>& parameters = outline().kind_of(part).part.parameters;
    ParameterPlaces places;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const UnitBuffers& buffers = store_.buffers(part.parameter_units[i]);
        const std::int64_t first =
            store_.layout(part.parameter_units[i]).entry(parameters[i].spec.name).offset;
        const auto place = [&](const Tensor& flat) {
            return flat.data + (parameters[i].spec.is_nf4
                                    ? nf4_bytes(first)
                                    : first * static_cast<std::int64_t>(size_of(flat.dtype)));
        };
        places.parameters.push_back(place(buffers.parameters));
        places.gradients.push_back(place(buffers.gradient_sums));
    }
    const std::vector<std::int64_t> first = first_amax(outline());
    const auto begin = first[static_cast<std::size_t>(number)],
               end = first[static_cast<std::size_t>(number) + 1];
    for (std::int64_t i = begin; activations_.amax.elements() > 0 && i < end; ++i) {
        places.amax.push_back(scaling_amax().flat(i, 1).data);
        places.amax.push_back(seen_amax().flat(i, 1).data);
    }
    return places;
}

void Executor::take(const Step& step, const StepInput& input) {
    step_ = &step;
    input_ = &input;
    tokens_.resize(std::max(tokens_.size(), static_cast<std::size_t>(step.micro_batches)));
}

void Executor::run(const Step& step, const StepInput& input) {
    take(step, input);
    check(input.update || !store_.update_is_pending(), "a list performs the pending update");
    begin();
    const Perform perform = [this](const Action& action) { return start(action); };
    streams_->begin(step, perform);
    try {
        for (int place = 0; place < std::ssize(step.actions); ++place) {
            const Action& action = step.actions[static_cast<std::size_t>(place)];
            if (streams_->is_on_lane(action)) continue;
            streams_->wait_before(place);
            streams_->record(place, start(action));
        }
        streams_->finish();
    } catch (...) {
        streams_->cancel();
        throw;
    }
}

void Executor::begin() {
    ops_.run(Fill{loss_sum(), 0.0F});
    // Entries that other ranks of the model compute are zero here: gather_squares adds the entries of all.
    if (groups_.shares_model()) ops_.run(Fill{activations_.norm_partials, 0.0F});
    if (input_->records_amax) ops_.run(Fill{seen_amax(), 0.0F});
}

void Executor::autotune(const Step& step, std::int64_t sequences, std::int64_t vocabulary,
                        const RowRange& rows) {
    const auto tokens = [vocabulary](int, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
        std::int64_t number = 0;
        for (const std::span<std::int32_t> of : {inputs, targets})
            for (std::int32_t& token : of) token = static_cast<std::int32_t>(number++ % vocabulary);
    };
    const StepInput input{.load = tokens,
                          .sequences = sequences,
                          .loss_scale = 1,
                          .rows = rows,
                          .records_amax = seen_amax().elements() > 0};
    take(step, input);
    ranks_ = ranks_.silent();
    for (const Action& action : step.actions) {
        if (action.stream == StreamKind::compute && action.kind != ActionKind::square &&
            action.kind != ActionKind::norm && action.kind != ActionKind::sum_replicated)
            start(action);
        if (action.kind == ActionKind::orthogonalise) {  // start() leaves updates out
            ops_.run(Fill{store_.directions().directions, 0.0F});
            perform(action);
        }
    }
    ranks_ = groups_.tensor_parallel();
    device_.synchronize();
}

void Executor::load_code(const Step& step, const Update& update) {
    const StepInput input{.update = update};
    take(step, input);
    begin();
    for (const Action& action : step.actions) {
        const bool updates =
            (action.kind == ActionKind::update || action.kind == ActionKind::momentum) && !updates_on_host_;
        if (updates || action.kind == ActionKind::orthogonalise ||
            action.kind == ActionKind::accumulate_shard || action.kind == ActionKind::square ||
            action.kind == ActionKind::norm)
            start(action);
    }
}

StepResults Executor::results() const {
    StepResults results{};
    static_assert(sizeof results == 2 * sizeof(double));
    device_.download(&results, activations_.results);
    return results;
}

// Every step's results are waited for before the next call, so that the copy of the last one has ended.
void Executor::set_amax(std::span<const float> amax) {
    std::memcpy(staged_amax_.get(), amax.data(), amax.size_bytes());
    device_.upload(scaling_amax(), staged_amax_.get());
}

std::vector<float> Executor::recorded_amax() const {
    std::vector<float> seen(static_cast<std::size_t>(seen_amax().elements()));
    device_.download(seen.data(), seen_amax());
    return seen;
}

void Executor::record_weights() {
    ops_.run(Fill{seen_amax(), 0.0F});
    for (const Chunk& chunk : store_.part().chunks) {
        for (int number = chunk.first_part; number < chunk.end_part; ++number) {
            const Outline::OutlinedPart& part = outline().part(number);
            const ParameterPlaces& places = parameters_[static_cast<std::size_t>(number)];
            std::size_t product = 0;
            for (const Node& node : outline().kind_of(part).part.nodes) {
                if (!node.operation->may_be_in_fp8) continue;
                const std::size_t operand =
                    fp8_operands * product++ + static_cast<std::size_t>(Fp8Operand::matrix);
                // The matrices come first, then their biases.
                for (std::size_t i = 0; i < node.parameters.size() / 2; ++i) {
                    const auto parameter = static_cast<std::size_t>(node.parameters[i]);
                    const int unit = part.parameter_units[parameter];
                    const UnitLayout::Entry& entry = store_.layout(unit).entry(
                        outline().kind_of(part).part.parameters[parameter].spec.name);
                    const ElementRange own = store_.updated(unit),
                                       mine = intersection(
                                           {entry.offset, entry.offset + entry.stored.elements()}, own);
                    if (mine.size() == 0) continue;
                    store_.fetch_parameters(unit);
                    ops_.run(Amax{
                        {places.amax[2 * operand + 1], DType::fp32, {1}},
                        store_.buffers(unit).updated_parameters.flat(mine.begin - own.begin, mine.size())});
                }
            }
        }
    }
    reduce_amax();
}

}  // namespace llmc
