// Runs lists of actions: the parts of the model, and transfers. executor_units.cpp performs the actions on units.
#include "llmc/parallel/step/executor.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "llmc/core/error.h"

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
        const auto first = static_cast<std::size_t>(
            store_.layout(part.parameter_units[i]).entry(parameters[i].spec.name).offset);
        const auto place = [&](const Tensor& flat) { return flat.data + first * size_of(flat.dtype); };
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
    transfers_.resize(std::max(transfers_.size(), step.actions.size()));
    begin();
    streams_->run(step, *this);
}

void Executor::begin() {
    ops_.fill(loss_sum(), 0.0F);
    // Entries that other ranks of the model compute are zero here: gather_squares adds the entries of all.
    if (groups_.shares_model()) ops_.fill(activations_.norm_partials, 0.0F);
    if (input_->records_amax) ops_.fill(seen_amax(), 0.0F);
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
            perform(action);
    }
    ranks_ = groups_.tensor_parallel();
    device_.synchronize();
}

void Executor::load_code(const Step& step, const Update& update) {
    const StepInput input{.update = update};
    take(step, input);
    begin();
    for (const Action& action : step.actions) {
        const bool updates = action.kind == ActionKind::update && !updates_on_host_;
        if (updates || action.kind == ActionKind::accumulate_shard || action.kind == ActionKind::square ||
            action.kind == ActionKind::norm)
            perform(action);
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
    ops_.fill(seen_amax(), 0.0F);
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
                    ops_.amax(
                        {places.amax[2 * operand + 1], DType::fp32, {1}},
                        store_.buffers(unit).updated_parameters.flat(mine.begin - own.begin, mine.size()));
                }
            }
        }
    }
    reduce_amax();
}

bool Executor::is_left_out(const Action& action) const { return action.is_of_update && !input_->update; }

void Executor::perform(const Action& action) {
    if (is_left_out(action)) return;
    switch (action.kind) {
        case ActionKind::load:
            return load(action);
        case ActionKind::zero:
            return ops_.fill(store_.buffers(action.unit).gradient_sums, 0.0F);
        case ActionKind::gather_parameters:
            return gather_parameters(action.unit);
        case ActionKind::release:
            return;  // only orders other actions
        case ActionKind::forward:
            return run_part(action, lists_of(action).forward);
        case ActionKind::forward_rows:
        case ActionKind::logits:
            return forward_rows(action);
        case ActionKind::recompute:
            return run_part(action, lists_of(action).recompute_of(step_->recompute.kind));
        case ActionKind::backward:
            return run_part(action, lists_of(action).backward);
        case ActionKind::backward_input:
            return run_part(action, lists_of(action).backward_input);
        case ActionKind::backward_weight:
            return run_part(action, lists_of(action).backward_weight);
        case ActionKind::receive_activation:
        case ActionKind::send_activation:
        case ActionKind::receive_gradient:
        case ActionKind::send_gradient:
            return transfer(action);
        case ActionKind::round:
            return ops_.cast(store_.buffers(action.unit).gradients,
                             store_.buffers(action.unit).gradient_sums);
        case ActionKind::accumulate:
            return accumulate(action);
        case ActionKind::reduce_scatter:
            return reduce_scatter(action);
        case ActionKind::all_reduce:
            return groups_.replicas().all_reduce(received_shard(action.writes.front()));
        case ActionKind::accumulate_shard:
            return accumulate_shard(action);
        case ActionKind::sum_replicated: {
            const UnitLayout& layout = store_.layout(action.unit);
            const Tensor& gradients = store_.buffers(action.unit).gradients;
            const std::int64_t begin = layout.replicated_begin();
            return ranks_.group().all_reduce(gradients.flat(begin, layout.elements() - begin));
        }
        case ActionKind::sum_tied:
            return groups_.tied(action.unit).all_reduce(store_.buffers(action.unit).gradient_shard);
        case ActionKind::gather_gradients:
            return gather_gradients(action.unit);
        case ActionKind::reduce_loss:
            return reduce_loss();
        case ActionKind::reduce_amax:
            return reduce_amax();
        case ActionKind::square:
            return square(action);
        case ActionKind::gather_squares:
            return gather_squares();
        case ActionKind::norm:
            return norm();
        case ActionKind::update:
            return action.piece < 0 ? update(action.unit) : update_piece(action);
        case ActionKind::read_state:
        case ActionKind::write_state:
        case ActionKind::read_parameters:
        case ActionKind::write_parameters:
            return transfer_from_or_to_disk(action);
        case ActionKind::upload_parameters:
        case ActionKind::download_parameters:
        case ActionKind::upload_gradients:
        case ActionKind::download_gradients:
            return copy_between_host_and_device(action);
    }
}

bool Executor::is_done(const Action& action) {
    const int transfer = transfers_[static_cast<std::size_t>(&action - step_->actions.data())];
    if (is_left_out(action)) return true;
    if (is_on_disk(action)) return store_.file().is_done(transfer);
    return groups_.link(action.kind).pair->is_done(transfer);
}

// The buffer in which an action on a piece of optimizer state has it.
int Executor::buffer_of(const Action& action) {
    const auto& uses = action.kind == ActionKind::read_state ? action.writes : action.reads;
    return std::ranges::find(uses, BufferRole::state_piece, &BufferUse::role)->index;
}

void Executor::transfer_from_or_to_disk(const Action& action) {
    int& number = transfers_[static_cast<std::size_t>(&action - step_->actions.data())];
    switch (action.kind) {
        case ActionKind::read_state:
            number = store_.begin_read(action.unit, action.piece, buffer_of(action));
            return;
        case ActionKind::write_state:
            number = store_.begin_write(action.unit, action.piece, buffer_of(action));
            return;
        case ActionKind::read_parameters:
            number = store_.begin_read_parameters(action.unit);
            return;
        default:
            number = store_.begin_write_parameters(action.unit);
            return;
    }
}

// Where parameters or gradients of a unit are on the device.
Tensor Executor::on_device(const BufferUse& use) const {
    const UnitBuffers& b = store_.buffers(use.unit);
    switch (use.role) {
        case BufferRole::parameters:
            return b.parameters;
        case BufferRole::parameter_shard:
            return b.parameter_shard;
        case BufferRole::gradient_shard:
            return b.gradient_shard;
        default:
            return b.gradients;
    }
}

void Executor::copy_between_host_and_device(const Action& action) {
    const bool is_upload = action.reads.front().tier == Tier::host;
    const UnitBuffers& b = store_.buffers(action.unit);
    const bool of_parameters = moves_parameters(action.kind);
    const Tensor& host = of_parameters ? b.host_parameters : b.host_gradients;
    Tensor device = on_device((is_upload ? action.writes : action.reads).front());
    // A rank's share lies in the whole.
    if (device.elements() != host.elements()) device = store_.own_shard(device);
    is_upload ? device_.upload(device, host.data) : device_.begin_download(host.data, device);
}

void Executor::transfer(const Action& action) {
    const StageLink& link = groups_.link(action.kind);
    int& number = transfers_[static_cast<std::size_t>(&action - step_->actions.data())];
    switch (action.kind) {
        case ActionKind::receive_activation:
            number = link.pair->start_recv(stream(action, action.writes), link.peer);
            return;
        case ActionKind::send_activation:
            number = link.pair->start_send(stream(action, action.reads), link.peer);
            return;
        case ActionKind::receive_gradient:
            number = link.pair->start_recv(gradient(action.writes), link.peer);
            return;
        default:
            number = link.pair->start_send(gradient(action.reads), link.peer);
            return;
    }
}

void Executor::load(const Action& action) {
    const auto fill = [&](int micro_batch) {
        return [this, micro_batch](std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
            input_->load(micro_batch, inputs, targets);
        };
    };
    std::optional<BatchPlace> place;
    if (input_->step) place = {*input_->step, action.micro_batch};
    const auto these = fill(action.micro_batch), next = fill(action.micro_batch + 1);
    tokens_[static_cast<std::size_t>(action.micro_batch)] =
        feed_.load(place, input_->sequences, std::ref(these));
    if (!place) return;
    BatchPlace following{*input_->step, action.micro_batch + 1};
    if (following.micro_batch == step_->micro_batches) following = {*input_->step + 1, 0};
    feed_.bring_ahead(following, input_->sequences, std::ref(next));
}

Tensor Executor::stream(const Action& action, std::span<const BufferUse> uses) const {
    for (const BufferUse& use : uses) {
        const auto index = static_cast<std::size_t>(use.index);
        if (use.role == BufferRole::rows) return rows(use.index);
        if (use.role == BufferRole::chunk_input)
            return activations_.chunk_inputs[index].slice(0, input_->sequences);
        if (use.role == BufferRole::residual)
            return activations_.slots[static_cast<std::size_t>(action.slot)].residual[index - 1].slice(
                0, input_->sequences);
    }
    return {};
}

Tensor Executor::gradient(std::span<const BufferUse> uses) const {
    for (const BufferUse& use : uses) {
        if (use.role == BufferRole::residual_gradient)
            return activations_.residual_gradients[static_cast<std::size_t>(use.index)].slice(
                0, input_->sequences);
    }
    return {};
}

Tensor Executor::rows(int width) const {
    const Tensor& buffer = activations_.residual_gradients[static_cast<std::size_t>(width)];
    const std::int64_t n = input_->rows.count, C = buffer.shape.last();
    return buffer.flat(0, n * C).view({1, n, C});
}

PartMemory Executor::memory_of(const Action& action) const {
    const auto slot = static_cast<std::size_t>(action.slot);
    const ParameterPlaces& parameters = parameters_[static_cast<std::size_t>(action.part)];
    PartMemory memory;
    memory[Space::input] = stream(action, action.reads).data;
    memory[Space::output] = stream(action, action.writes).data;
    memory[Space::input_gradient] = gradient(action.writes).data;
    memory[Space::output_gradient] = gradient(action.reads).data;
    const TokenBuffers<Tensor>& tokens = tokens_[static_cast<std::size_t>(action.micro_batch)];
    memory[Space::tokens] = tokens.inputs.data;
    memory[Space::targets] = tokens.targets.data;
    memory.all(Space::scratch) = scratch_;
    memory.all(Space::angles) = angles_;
    memory.all(Space::parameter) = parameters.parameters;
    memory.all(Space::parameter_gradient) = parameters.gradients;
    memory.all(Space::amax) = parameters.amax;
    const int place = action.part - step_->chunk_of(action).first_with_input() + 1;
    memory.all(Space::kept) =
        part_of(action).makes_losses() ? losses_ : kept_[slot][static_cast<std::size_t>(place)];
    for (const auto* uses : {&action.reads, &action.writes}) {
        for (const BufferUse& use : *uses) {
            if (use.role == BufferRole::output_gradients)
                memory.all(Space::kept_gradient) = output_gradients_[static_cast<std::size_t>(use.index)];
        }
    }
    return memory;
}

Running Executor::running(const RowRange& rows) const {
    return {.ops = ops_,
            .ranks = ranks_,
            .node = nullptr,
            .loss_scale = input_->loss_scale,
            .rows = rows,
            .records_amax = input_->records_amax};
}

void Executor::run_part(const Action& action, const List& list) {
    run_list(list, memory_of(action), input_->sequences, running({}));
    if (part_of(action).makes_losses()) sum_losses(action);
}

void Executor::sum_losses(const Action& action) {
    const Tensor losses =
        activations_.losses[static_cast<std::size_t>(lists_of(action).losses)].slice(0, input_->sequences);
    if (action.kind == ActionKind::forward && input_->see_losses)
        input_->see_losses(action.micro_batch, losses);
    ops_.sum(loss_sum(), losses);
}

// Runs a part for a few rows. The head computes the logits of the last row only.
void Executor::forward_rows(const Action& action) {
    const PartLists& lists = lists_of(action);
    RowRange range = input_->rows;
    PartMemory memory = memory_of(action);
    if (action.kind == ActionKind::logits) {
        memory[Space::input] =
            stream(action, action.reads)
                .view({range.count, outline().widths[static_cast<std::size_t>(part_of(action).input_width)]})
                .slice(range.count - 1, 1)
                .data;
        range = {range.position + range.count - 1, 1};
    }
    const bool keeps_input = step_->recompute.kind == RecomputeKind::block && part_of(action).is_layer() &&
                             step_->recompute.recomputes(part_of(action).layer) && !lists.rows_of_all.empty();
    if (keeps_input) {
        std::vector<BufferUse> kept = action.writes;
        std::erase_if(kept, [](const BufferUse& use) { return use.role == BufferRole::rows; });
        memory[Space::kept_input] = stream(action, kept).data;
    }
    if (!action.writes.empty() && action.kind != ActionKind::logits)
        memory[Space::output] = rows(part_of(action).output_width).data;
    run_list(keeps_input ? lists.rows_of_all : lists.rows, memory, 1, running(range));
    if (action.kind != ActionKind::logits) return;
    const Tensor& made = activations_.losses[static_cast<std::size_t>(lists.logits)];
    logits_ = ranks_.is_shared() ? made.view({1, made.elements()}) : made.slice(0, 1);
}

}  // namespace llmc
