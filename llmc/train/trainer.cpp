#include "llmc/train/trainer.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <string>
#include <utility>

#include "llmc/comm/texts_of_ranks.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/core/random.h"
#include "llmc/io/checkpoint.h"
#include "llmc/io/model_files.h"
#include "llmc/io/stored_tensors.h"
#include "llmc/train/algorithms.h"
#include "llmc/train/diagnosis.h"
#include "llmc/train/stop.h"
#include "llmc/train/token_choice.h"

namespace llmc {

namespace {

// A number for a message. The sign of a nan is left out.
std::string named(double value) { return std::isnan(value) ? "nan" : fmt::format("{}", value); }

}  // namespace

Trainer::Trainer(const Options& options, const RunPlan& plan, Device& device, Communicator& world,
                 const MeshGroups& groups, bool resumes, const std::string& scratch)
    : options_(options),
      plan_(plan),
      device_(device),
      world_(world),
      arenas_(device, plan.memory),
      store_(device, arenas_, plan.store, options.weight_decay.value(), plan.spec.mesh.shard(), scratch,
             options.numbers_of(options.optimizer_used())),
      transfer_(store_, world, plan.spec.mesh, plan.parts),
      executor_(*plan.lists, device, groups, store_, bind(plan.activations, arenas_),
                static_cast<int>(plan.micro_batches), options.overlap_grad_reduce),
      schedule_(schedule_of(options)),
      scaler_(options),
      fp8_(options, *plan.outline) {
    device.ops().set_workspace(arenas_[plan.workspace]);
    if (plan.spec.copies_checkpoints) {
        on_any_rank(world, !arenas_.has_copy())
            ? arenas_.release_copy()
            : static_cast<void>(copy_.emplace(store_, arenas_, plan.copy, plan.spec.mesh, plan.parts));
    }
    if (store_.has_file() && plan.spec.trains) disk_speed_ = store_.file().probe();
    const auto load_weights = [&] {
        return naming_option("--init", [&] {
            return load_stored([&] { return find_weights(options.weights); }, store_, transfer_);
        });
    };
    if (options.has_adapters()) {
        base_checksum_ = options.weights.empty() ? "" : load_weights();
        if (options.weights.empty()) store_.initialize(options.seed);
    }
    if (resumes) return;
    if (options.has_adapters()) {
        begin_adapters();
    } else if (options.init.empty()) {
        store_.initialize(options.seed);
    } else {
        load_weights();
    }
    executor_.run(plan_.parameter_gathers, {});
    begin_fp8();
}

void Trainer::begin_adapters() {
    if (options_.lora.empty()) return store_.initialize(options_.seed, true);
    naming_option("--lora", [&] {
        require_base(options_.base_checksum, options_.lora);
        const std::filesystem::path file = std::filesystem::path(options_.lora) / adapter_weights_file;
        load_stored([&] { return find_tensors(file); }, store_, transfer_, Tensors::adapters);
    });
}

// Adapters say something only beside the weights with which they were trained.
void Trainer::require_base(const std::string& checksum, const std::string& adapters) const {
    if (checksum.empty() || checksum == base_checksum_) return;
    shared_error(
        "{} was trained beside other weights than those of {} (checksum {}, not {}); give its own base with "
        "--init",
        adapters, options_.weights, checksum, base_checksum_);
}

void Trainer::begin_fp8() {
    if (!fp8_.is_delayed()) return;
    device_.synchronize();  // parameters are still gathered
    executor_.record_weights();
    fp8_.begin(executor_.recorded_amax());
    executor_.set_amax(fp8_.amax());
    progress_.fp8 = fp8_.state();
}

std::set<std::int64_t> Trainer::row_counts(std::int64_t prompt_tokens) const {
    const std::int64_t T = plan_.spec.model.sequence_length, most = plan_.spec.mesh.split().tokens(T);
    std::set<std::int64_t> counts = {1};
    for (const std::int64_t context : {std::min(prompt_tokens, T), std::max<std::int64_t>(T / 2, 1)}) {
        if (context >= most) counts.insert(most);
        if (context % most != 0) counts.insert(context % most);
    }
    return counts;
}

void Trainer::choose_algorithms(std::string_view earlier, std::int64_t prompt_tokens) {
    if (!device_.streams()) return;
    device_.adopt_choices(broadcast_text(world_, std::string(earlier), 0));
    const Mesh& mesh = plan_.spec.mesh;
    // Each stage may have product shapes that others lack. In a tensor-parallel group, only the first rank
    // adds the bias of a product whose outputs are summed. So one or two ranks per stage measure in turn,
    // each only what no earlier one has measured.
    std::vector<int> roots;
    for (int stage = 0; stage < mesh.pipeline; ++stage) {
        for (int tensor = 0; tensor < std::min(mesh.tensor, 2); ++tensor)
            roots.push_back(mesh.rank_of(stage, 0, tensor));
    }
    device_.synchronize();  // parameters are still gathered
    const auto perform_lists = [&] {
        const std::int64_t vocabulary = plan_.spec.model.vocabulary;
        executor_.autotune(plan_.training, plan_.micro_batch, vocabulary);
        executor_.autotune(plan_.evaluation, plan_.micro_batch, vocabulary);
        for (const std::int64_t rows : row_counts(prompt_tokens))
            executor_.autotune(plan_.generation, 1, vocabulary, {.position = 0, .count = rows});
    };
    for (const int root : roots) {
        if (world_.rank() == root) {
            device_.set_autotuning(true);
            perform_lists();
            device_.set_autotuning(false);
        }
        const std::string choices = broadcast_text(world_, device_.choices(), root);
        device_.adopt_choices(choices);
        algorithms_ = merged_choices(algorithms_, choices);
    }
    // Code is loaded when it is first called. In a step that would be beside operations of NCCL that wait for other
    // ranks, while loading may wait for all work of the device.
    device_.set_loading(true);
    if (std::ranges::find(roots, world_.rank()) == roots.end()) perform_lists();
    // Samples under --recompute block multiply all rows so far: more shapes than are chosen for.
    if (plan_.spec.model.sequence_length > 1)
        executor_.autotune(plan_.generation, 1, plan_.spec.model.vocabulary, {.position = 1, .count = 1});
    executor_.load_code(plan_.training, next_update());
    device_.set_loading(false);
    for (const LeftOut& of_rank : values_of_ranks(world_, device_.left_out())) {
        left_out_.failing += of_rank.failing;
        left_out_.varying += of_rank.varying;
    }
}

Update Trainer::next_update() const {
    const std::int64_t step = progress_.applied() + 1;
    const Optimizer& optimizer = options_.optimizer_used();
    Update update{.step = {.step = step,
                           .learning_rate = learning_rate(schedule_, step),
                           .numbers = options_.numbers_of(optimizer),
                           .max_grad_norm = options_.grad_clip,
                           .loss_scale = scaler_.scale()},
                  .rounding_seed = rounding_seed()};
    if (optimizer.others) {
        update.others = update.step;
        update.others.numbers = options_.numbers_of(*optimizer.others);
        Schedule own = schedule_;
        own.peak = optimizer.own_rate(own.peak, update.step.numbers);
        update.step.learning_rate = learning_rate(own, step);
    }
    if (store_.dtype_of_moments() == DType::bf16) update.state_seed = options_.seed;
    return update;
}

std::optional<std::uint64_t> Trainer::rounding_seed() const {
    return options_.rounds_stochastically() ? std::optional(options_.seed) : std::nullopt;
}

void Trainer::run(const Step& list, const StepInput& input) {
    if (!store_.has_file()) return executor_.run(list, input);
    const ScratchFile::Traffic before = store_.traffic();
    executor_.run(list, input);
    device_.synchronize();
    const ScratchFile::Traffic after = store_.traffic();
    for (StepMetrics::Disk* disk : {&disk_, &disk_of_step_}) {
        disk->read_bytes += after.read - before.read;
        disk->written_bytes += after.written - before.written;
        disk->ms += 1e3 * (after.seconds - before.seconds);
        disk->waited_ms += executor_.times()[Phase::disk];
    }
}

void Trainer::finish_update() {
    if (!pending_update_) return;
    const auto start = std::chrono::steady_clock::now();
    run(plan_.update, {.update = pending_update_});
    device_.synchronize();
    const PhaseTimes phases = executor_.times();
    finished_ = {std::chrono::steady_clock::now() - start, phases};
    set_pending_update({});
}

void Trainer::set_pending_update(const std::optional<Update>& update) {
    pending_update_ = update;
    store_.set_update_pending(update.has_value());
}

StepMetrics Trainer::train_step(TrainingBatches& batches) {
    const std::int64_t B = plan_.micro_batch;
    const auto load = [&](int micro_batch, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
        batches.read(progress_.samples, micro_batch, inputs, targets);
    };

    const auto start = std::chrono::steady_clock::now();
    Update update = next_update();
    const auto global_tokens = static_cast<double>(plan_.spec.global_batch_tokens);
    // The loss is the mean over the targets of the whole step. Every rank counts them all, without a message.
    const std::int64_t targets = batches.targets(progress_.samples);
    run(plan_.training, {.load = std::ref(load),  // std::ref: allocates nothing
                         .sequences = B,
                         .step = progress_.step + 1,
                         .loss_scale = static_cast<float>(scaler_.scale() / static_cast<double>(targets)),
                         .gradient_seed = options_.seed,
                         .update = pending_update_,
                         .records_amax = fp8_.is_delayed()});
    set_pending_update({});
    // Before the next all-gather of updated parameters, which would hide a difference.
    if (is_due(options_.check_replicas_every, progress_.step + 1)) require_equal_replicas();
    const StepResults results = executor_.results();
    const double loss = results.loss_sum / static_cast<double>(targets);
    const double norm = std::sqrt(results.norm_squared) / scaler_.scale();
    const bool is_skipped = scaler_.skips() && std::isfinite(loss) && !std::isfinite(norm);
    // With the update of the step before, also if a validation or a save has finished it.
    const FinishedUpdate finished = std::exchange(finished_, {});
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start + finished.elapsed;
    if (!is_skipped && (!std::isfinite(loss) || !std::isfinite(norm))) {
        const ForwardPasses passes = forward_passes(plan_.training.micro_batches, std::ref(load));
        shared_error(
            "step {}: the loss is {} and the gradient's norm {}; the first tensor that is not finite is {}; "
            "{}",
            progress_.step + 1, named(loss), named(norm),
            first_non_finite(plan_, arenas_, device_, store_, world_, passes), advice_if_not_finite());
    }

    update.norm_squared = results.norm_squared;
    if (!is_skipped) set_pending_update(update);
    const double scale = scaler_.scale();
    is_skipped ? scaler_.see_overflow(progress_.step + 1) : scaler_.see_good_step();
    progress_.step += 1;
    progress_.samples += plan_.global_sequences();
    progress_.skipped += is_skipped ? 1 : 0;
    progress_.skipped_in_a_row = scaler_.skipped_in_a_row();
    progress_.loss_scale = scaler_.state();
    if (fp8_.is_delayed() && !is_skipped) {
        fp8_.see(executor_.recorded_amax());
        executor_.set_amax(fp8_.amax());
        progress_.fp8 = fp8_.state();
    }
    // With what lists since the step before have moved: a validation or a save finishes the update first.
    std::optional<StepMetrics::Disk> disk;
    if (store_.has_file()) disk = std::exchange(disk_of_step_, {});
    PhaseTimes phases = executor_.times();
    for (const Phase phase : all_phases) phases[phase] += finished.phases[phase];
    return {.step = progress_.step,
            .loss = loss,
            .grad_norm = is_skipped ? std::nullopt : std::optional(norm),
            .learning_rate = learning_rate(schedule_, update.step.step),
            .tokens = tokens(),
            .targets = batches.has_rows() ? std::optional(targets) : std::nullopt,
            .tokens_per_second = global_tokens / elapsed.count(),
            .step_ms = 1e3 * elapsed.count(),
            .phase_ms = phases,
            .model_flops_utilization = model_flops_utilization(global_tokens / elapsed.count()),
            .val_loss = {},
            .disk = disk,
            .loss_scale = scaler_.scales() ? std::optional(scale) : std::nullopt,
            .skipped_steps = scaler_.skips() ? std::optional(progress_.skipped) : std::nullopt};
}

std::optional<double> Trainer::model_flops_utilization(double tokens_per_second) const {
    const std::optional<double> peak = device_.peak_flops(plan_.spec.dtype);
    if (!peak) return std::nullopt;
    return training_flops_per_token(plan_.spec.model) * tokens_per_second / (*peak * plan_.spec.mesh.world());
}

void Trainer::require_equal_replicas() {
    if (const auto difference = differing_replica(store_, world_)) {
        shared_error("step {}: {}; the cause is faulty memory, a faulty link or a bug; {}",
                     progress_.step + 1, *difference,
                     has_checkpoint() ? "resume from the last checkpoint" : "start again");
    }
}

bool Trainer::has_checkpoint() {
    if (settle_) settle_();
    return has_checkpoint_;
}

std::string Trainer::advice_if_not_finite() {
    if (scaler_.scales()) return "the largest number in fp16 is 65504: give --dtype bf16, or a smaller --lr";
    const std::string_view own_rate = options_.optimizer_used().own_rate_name;
    const std::string smaller_steps = fmt::format(
        "with a smaller --lr {}or more --warmup-steps",
        !own_rate.empty() && options_.is_given(own_rate) ? fmt::format("and --{} ", own_rate) : "");
    const bool updated = progress_.step > step_before_run_;
    if (has_checkpoint()) {
        return fmt::format("resume from {} checkpoint, or start again, {}",
                           updated ? "the last" : "an earlier", smaller_steps);
    }
    if (updated)
        return fmt::format("start again {}; --checkpoint-every saves checkpoints on the way", smaller_steps);
    if (options_.init.empty())
        return "there was no update yet, so the initial weights are the cause; give another --seed";
    if (options_.has_adapters())
        return "there was no update yet, so the weights of --init or the adapters' scale are the cause; give "
               "other weights, or a smaller --lora-alpha";
    return "there was no update yet, so the weights of --init are the cause; give other weights";
}

void Trainer::require_finite() {
    finish_update();
    if (const auto tensor = non_finite_state(store_, world_)) {
        shared_error("step {}: the update made {} not finite, so nothing is saved; {}", progress_.step,
                     *tensor, advice_if_not_finite());
    }
}

std::optional<double> Trainer::evaluate(std::string_view what, std::int64_t rows, const ReadRow& read,
                                        const std::function<void(std::int64_t, std::span<const float>)>& see,
                                        const Watch& watch) {
    const std::int64_t T = plan_.spec.model.sequence_length, B = plan_.micro_batch;
    const std::int64_t ranks = plan_.spec.mesh.data_ranks(), at_once = plan_.evaluation_sequences() * ranks;
    finish_update();
    double loss = 0;
    std::vector<float> losses;
    for (std::int64_t round = 0; round * at_once < rows; ++round) {
        if (!watch(static_cast<double>(round * at_once) / static_cast<double>(rows))) return std::nullopt;
        // Calls f(row, offset of its first token) for each sequence of a micro-batch. Rows beyond the last
        // are padding.
        const auto for_each_row = [&](int micro_batch, auto&& f) {
            const std::int64_t first =
                round * at_once + (micro_batch * ranks + plan_.spec.mesh.data_rank()) * B;
            for (std::int64_t b = 0; b < B; ++b) f(first + b, static_cast<std::size_t>(b * T));
        };
        const auto load = [&](int micro_batch, std::span<std::int32_t> inputs,
                              std::span<std::int32_t> targets) {
            for_each_row(micro_batch, [&](std::int64_t row, std::size_t begin) {
                const auto count = static_cast<std::size_t>(T);
                if (row < rows) {
                    read(row, inputs.subspan(begin, count), targets.subspan(begin, count));
                } else {
                    std::ranges::fill(inputs.subspan(begin, count), 0);
                    std::ranges::fill(targets.subspan(begin, count), ignored_target);
                }
            });
        };
        std::function<void(int, const Tensor&)> see_losses;
        if (see) {
            see_losses = [&](int micro_batch, const Tensor& on_device) {
                losses.resize(static_cast<std::size_t>(B * T));
                device_.download(losses.data(), on_device);
                for_each_row(micro_batch, [&](std::int64_t row, std::size_t begin) {
                    if (row < rows) see(row, std::span(losses).subspan(begin, static_cast<std::size_t>(T)));
                });
            };
        }
        run(plan_.evaluation, {.load = load, .sequences = B, .see_losses = see_losses});
        loss += executor_.results().loss_sum;
        if (!std::isfinite(loss)) {
            const ForwardPasses passes = forward_passes(plan_.evaluation.micro_batches, load);
            shared_error(
                "the loss of the {} after step {} is {}; the first tensor that is not finite is {}; {}", what,
                progress_.step, named(loss),
                first_non_finite(plan_, arenas_, device_, store_, world_, passes), advice_if_not_finite());
        }
    }
    return loss;
}

std::optional<double> Trainer::validate(const ValidationWindows& validation, std::int64_t windows,
                                        const Watch& watch) {
    const auto read = [&](std::int64_t window, std::span<std::int32_t> inputs,
                          std::span<std::int32_t> targets) { validation.read(window, inputs, targets); };
    const auto loss = evaluate("validation", windows, read, {}, watch);
    if (!loss) return std::nullopt;
    return *loss / static_cast<double>(validation.targets(windows));
}

std::optional<std::vector<double>> Trainer::losses_of_rows(std::int64_t rows, const ReadRow& read,
                                                           const Watch& watch) {
    std::vector<double> sums(static_cast<std::size_t>(rows));
    // Only tensor-parallel rank 0 adds a row's loss; the other ranks of its group add zero.
    const bool counts = plan_.spec.mesh.tensor_rank() == 0;
    const auto see = [&](std::int64_t row, std::span<const float> losses) {
        if (counts) sums[static_cast<std::size_t>(row)] = std::accumulate(losses.begin(), losses.end(), 0.0);
    };
    if (!evaluate("evaluation", rows, read, see, watch)) return std::nullopt;
    world_.all_reduce({reinterpret_cast<std::byte*>(sums.data()), DType::fp64, {rows}});
    return sums;
}

std::optional<std::vector<std::int32_t>> Trainer::generate(const Continuation& of, const Watch& watch) {
    check(!of.prompt.empty(), "the prompt has at least one token");
    const RandomStream random(options_.seed, "generate " + std::to_string(progress_.step));
    const auto T = static_cast<std::size_t>(plan_.spec.model.sequence_length);
    const auto rows_at_once =
        static_cast<std::size_t>(plan_.spec.mesh.split().tokens(plan_.spec.model.sequence_length));
    KeptContext none;
    KeptContext& kept = of.kept ? *of.kept : none;

    std::vector<std::int32_t> text(of.prompt.begin(), of.prompt.end());
    // The context is text[begin, ...), of which the cache knows text[begin, known). The last token's row gives the
    // next.
    std::size_t begin = text.size() - std::min(text.size(), T);
    const std::span prompt = std::span(text).subspan(begin, text.size() - 1 - begin);
    std::size_t known =
        begin + static_cast<std::size_t>(std::ranges::mismatch(prompt, kept.tokens).in1 - prompt.begin());
    bool is_cancelled = false;
    for (std::int64_t i = 0; i < of.count; ++i) {
        is_cancelled = !watch(static_cast<double>(i) / static_cast<double>(of.count));
        if (is_cancelled) break;
        if (text.size() - begin > T) begin = known = text.size() - std::max<std::size_t>(T / 2, 1);
        while (known < text.size()) {
            const std::size_t rows = std::min(rows_at_once, text.size() - known);
            const auto load = [&](int, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
                std::ranges::fill(inputs, 0);
                std::ranges::fill(targets, ignored_target);
                std::ranges::copy(std::span(text).subspan(known, rows), inputs.begin());
            };
            run(plan_.generation,
                {.load = load,
                 .sequences = 1,
                 .rows = {static_cast<std::int64_t>(known - begin), static_cast<std::int64_t>(rows)}});
            known += rows;
            kept.computed_rows += static_cast<std::int64_t>(rows);
        }
        const std::int32_t token = sample(random.uniform(static_cast<std::uint64_t>(i)));
        if (std::ranges::find(of.ends, token) != of.ends.end()) break;
        text.push_back(token);
        of.take(token);
    }
    kept.tokens.assign(text.begin() + static_cast<std::ptrdiff_t>(begin),
                       text.begin() + static_cast<std::ptrdiff_t>(known));
    if (is_cancelled) return std::nullopt;
    return std::vector<std::int32_t>(text.begin() + std::ssize(of.prompt), text.end());
}

std::int32_t Trainer::sample(double uniform) {
    const SamplerOptions sampler{
        .temperature = options_.temperature, .top_k = options_.top_k, .top_p = options_.top_p};
    std::int32_t token = 0;
    if (plan_.part().makes_losses()) {
        const Tensor& on_device = executor_.logits();
        std::vector<std::byte> row(on_device.bytes());
        device_.download(row.data(), on_device);
        std::vector<float> logits(static_cast<std::size_t>(plan_.spec.model.vocabulary));
        with_dtype(on_device.dtype, [&](auto element) {
            const auto* values = reinterpret_cast<const decltype(element)*>(row.data());
            std::transform(values, values + logits.size(), logits.begin(),
                           [](auto x) { return to_float(x); });
        });
        token = sample_token(logits, sampler, uniform);
    }
    const Mesh& mesh = plan_.spec.mesh;
    if (mesh.pipeline > 1) {
        const int head = mesh.rank_of(mesh.pipeline - 1, 0, 0);
        world_.broadcast({reinterpret_cast<std::byte*>(&token), DType::int32, {1}}, head);
    }
    return token;
}

ForwardPasses Trainer::forward_passes(
    int micro_batches,
    const std::function<void(int, std::span<std::int32_t>, std::span<std::int32_t>)>& load) {
    const auto run = [this, load](int micro_batch, const Step& list) {
        this->run(list, {.load = [&](int, auto inputs, auto targets) { load(micro_batch, inputs, targets); },
                         .sequences = plan_.micro_batch});
    };
    return {micro_batches, run};
}

void Trainer::resume(const CheckpointInfo& checkpoint) {
    if (checkpoint.base) require_base(checkpoint.base->checksum, checkpoint.directory.string());
    load_checkpoint(checkpoint, store_, transfer_, plan_.spec.trains);
    progress_ = checkpoint.progress;
    scaler_.restore(progress_.loss_scale, progress_.skipped_in_a_row);
    progress_.loss_scale = scaler_.state();
    step_before_run_ = progress_.step;
    has_checkpoint_ = true;
    // The files hold the master weights, from which the parameters follow; without master weights, the parameters.
    if (const auto seed = rounding_seed(); seed && store_.dtypes().keeps_master() && progress_.applied() > 0)
        store_.round_stochastically(*seed, progress_.applied());
    run(plan_.parameter_gathers, {});
    const bool has_history = fp8_.restore(progress_.fp8);
    progress_.fp8 = fp8_.state();
    has_history ? executor_.set_amax(fp8_.amax()) : begin_fp8();
}

}  // namespace llmc
