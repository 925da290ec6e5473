// Holds every unit's parameters, gradients, master weights and optimizer state, as store_layout.h has laid them out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/scratch_file.h"
#include "llmc/core/tensor.h"
#include "llmc/device/device.h"
#include "llmc/device/eight_bit_state.h"
#include "llmc/device/ops.h"
#include "llmc/optim/formulas.h"
#include "llmc/parallel/zero/store_layout.h"

namespace llmc {

// A unit's flat buffers (UnitBufferIds).
struct UnitBuffers {
    Tensor parameters, gradients, gradient_sums;  // whole
    Tensor parameter_shard, gradient_shard;
    // The elements that this rank updates: all if it keeps the optimizer state whole, else its shard.
    Tensor updated_parameters, updated_gradients, master;
    std::array<UpdateState, most_states> state;  // by the optimizer's tensors of state
    Tensor directions;                           // of the matrices that are updated as a whole
    // In the host's memory beside a device: those offloaded or updated there; and what the host updates with.
    Tensor host_parameters, host_gradients;
};

// What one call of an optimizer updates: a range of the elements of a unit that this rank updates.
struct UpdateGroup {
    const Optimizer* optimizer;
    ElementRange range;
    // Where its elements begin in each tensor of state.
    std::array<std::int64_t, most_states> in_state;
    std::vector<UpdateSegment> segments;  // counted from the range's beginning
};

// What a rank has of each element that it updates; `whole_parameters` are those of all elements of a unit.
enum class Kept : std::uint8_t { whole_parameters, parameters, gradients, master, state1, state2 };
// A tensor of state by its number.
constexpr Kept kept_state(std::size_t number) { return number == 0 ? Kept::state1 : Kept::state2; }

class ParameterStore {
  public:
    // `shard` is this rank's shard. `weight_decay` applies to the tensors whose ParamSpec decays.
    // State and parameters on disk lie in a file of `directory`. `numbers` are the optimizer's hyperparameters.
    ParameterStore(Device& device, const Arenas& arenas, const StoreLayout& layout, double weight_decay,
                   int shard, const std::string& directory = "", const HyperparameterValues& numbers = {});

    int units() const { return static_cast<int>(layouts_.size()); }
    DType dtype() const { return dtypes_.compute; }
    const StoreDtypes& dtypes() const { return dtypes_; }
    DType dtype_of_moments() const { return dtypes_.moments; }
    const Optimizer& optimizer() const { return dtypes_.chosen(); }
    bool is_frozen(int unit) const { return part_.outline->unit(unit).spec.is_frozen(); }
    bool is_nf4(int unit) const { return part_.outline->unit(unit).spec.is_nf4(); }
    // Whether master weights are kept beside a unit's parameters.
    bool has_master(int unit) const { return dtypes_.keeps_master() && !is_frozen(unit); }
    bool is_state_on_disk() const { return sharding_.offload.state == Tier::disk; }
    const Sharding& sharding() const { return sharding_; }
    const StagePart& part() const { return part_; }
    int shard() const { return shard_; }
    // Whether this rank's stage has a unit. Other units have no buffers.
    bool has(int unit) const { return part_.has_unit(unit); }
    std::span<const UnitLayout> layouts() const { return layouts_; }
    const UnitLayout& layout(int unit) const { return layouts_[static_cast<std::size_t>(unit)]; }
    const UnitBuffers& buffers(int unit) const { return buffers_[static_cast<std::size_t>(unit)]; }
    // The operands of an update: where the host updates, all of them lie in the host's memory.
    UnitBuffers operands(int unit) const;
    // What this rank updates of a unit.
    std::span<const UpdateGroup> groups(int unit) const { return groups_[static_cast<std::size_t>(unit)]; }
    // The operands of a group: its part of those of the unit.
    static UnitBuffers operands(const UnitBuffers& of_unit, const UpdateGroup& group);
    // What the update of whole matrices needs, and of these the directions that this rank updates with.
    const DirectionBuffers<Tensor>& directions() const { return directions_; }
    Tensor own_directions(int unit) const;
    Tensor own_directions_on_host(int unit) const {
        return directions_.own_on_host.flat(0, updated(unit).size());
    }
    // Those of the tensor-parallel rank's part of the unit.
    Tensor directions_of_rank(int unit) const;
    // The optimizer of a tensor.
    const Optimizer& optimizer_of(int unit, const ParamSpec& spec) const {
        return dtypes_.optimizer_of(part_.outline->unit(unit), spec);
    }
    // Whether a tensor has this: state exists only where the tensor's optimizer has it.
    bool has(int unit, const ParamSpec& spec, Kept kept) const {
        return !is_of_optimizer(kept) ||
               (!spec.is_frozen && number_of(kept) < optimizer_of(unit, spec).state.size());
    }

    // ---- state on disk. A piece's number counts those of the unit.

    std::span<const StatePiece> pieces(int unit) const { return pieces_[static_cast<std::size_t>(unit)]; }
    // Begin the transfer of a piece from or to the file.
    int begin_read(int unit, int piece, int buffer) const;
    int begin_write(int unit, int piece, int buffer) const;
    // The same of a unit's parameters: whole, or at stage 3 this rank's shard.
    int begin_read_parameters(int unit) const;
    int begin_write_parameters(int unit) const;
    // Brings them into their buffer on the device, unless they are always there.
    void fetch_parameters(int unit) const;
    ScratchFile& file() const { return *file_; }
    bool has_file() const { return file_ != nullptr; }
    ScratchFile::Traffic traffic() const { return file_ ? file_->traffic() : ScratchFile::Traffic{}; }
    // The piece's elements of what an update reads and writes; master weights and moments in a buffer.
    UnitBuffers in_buffer(int unit, int piece, int buffer) const;
    std::vector<UpdateGroup> groups(int unit, const StatePiece& piece) const;

    // ---- The update of the last step is pending until the next step, or Trainer::finish_update. Until then, reading
    // or setting state throws a ProgrammingError.

    void set_update_pending(bool is_pending) { update_is_pending_ = is_pending; }
    bool update_is_pending() const { return update_is_pending_; }

    // ----

    // Elements of a unit's whole flat buffer; those in a shard; those that this rank updates.
    std::int64_t elements(int unit) const { return layout(unit).padded_elements(sharding_.ranks()); }
    ElementRange shard(int unit, int shard) const;
    ElementRange updated(int unit) const;
    // The number of an element of a unit in the model as this tensor-parallel rank lays it out, with all stages; and of
    // the first that this rank updates. It does not depend on the number of data-parallel ranks.
    std::int64_t element_number(int unit, std::int64_t element) const;
    std::int64_t first_element(int unit) const { return element_number(unit, updated(unit).begin); }
    // This rank's shard of a flat buffer: of a unit's elements, or of one number per norm block of the unit.
    Tensor own_shard(const Tensor& flat) const;

    // ---- Access by windows: runs of the elements that this rank updates of a unit, counted from the first of these. A
    // window begins at a multiple of this number, and the last one ends with the elements.
    std::int64_t window(int unit) const;

    // Sets the weights of a window from fp32 values on the host: the master weights, and from them, rounded, the
    // parameters. build_parameter_gathers later gathers the elements that other ranks update.
    void set_weights(int unit, const ElementRange& window, std::span<const float> values);
    // Sets a tensor of state.
    void set_state(int unit, Kept kept, const ElementRange& window, std::span<const float> values) const;
    // Reads any run, in fp32.
    void read(int unit, Kept kept, const ElementRange& run, std::span<float> values) const;
    // The same of all elements.
    void set_weights(int unit, std::span<const float> values) { set_weights(unit, all(values), values); }
    void set_state(int unit, Kept kept, std::span<const float> values) const {
        set_state(unit, kept, all(values), values);
    }
    void read(int unit, Kept kept, std::span<float> values) const { read(unit, kept, all(values), values); }
    // The dtype that holds them exactly. The second function reads in it, what a tensor's optimizer has.
    DType dtype_in_files(int unit, Kept kept) const;
    void read_stored(int unit, Kept kept, const ElementRange& run, std::span<std::byte> bytes) const;
    // Whether a read brings the unit's offloaded parameters to the device, all of them.
    bool reads_offloaded_parameters(int unit, Kept kept) const {
        return are_offloaded(unit) && is_of_parameters(unit, kept);
    }

    // Calls f for the tensors that hold a part of these elements, which are those of one tensor, and the device in
    // whose memory they are. They are several for state in 8 bits, and for state on disk, which passes through a
    // buffer.
    void for_each_held(int unit, Kept kept, const ElementRange& part,
                       const std::function<void(Device&, const Tensor&)>& f) const;
    // Rounds this rank's master weights into its parameters as the update's stochastic rounding did after `step`.
    void round_stochastically(std::uint64_t seed, std::int64_t step);
    // Sets this rank's initial weights. They are the same on every mesh.
    void initialize(std::uint64_t seed, bool trained_only = false);

  private:
    std::vector<UpdateGroup> make_groups(int unit, double weight_decay,
                                         const HyperparameterValues& numbers) const;
    // Calls f(a part of the run, the tensor that holds it) for those of a tensor of state that is not in 8 bits; or of
    // what is not in 8 bits, wherever it is.
    template <class F>
    void for_each_run_of_state(int unit, Kept kept, const ElementRange& run, const F& f) const;
    template <class F>
    void for_each_part(int unit, Kept kept, const ElementRange& run, const F& f) const;
    void set_nf4(int unit, const ElementRange& window, std::span<const float> values) const;
    void read_nf4(int unit, const ElementRange& run, std::span<float> values) const;
    void read_8_bits(int unit, Kept kept, const ElementRange& run, std::span<float> values) const;
    static ElementRange all(std::span<const float> values) { return {0, std::ssize(values)}; }
    static bool is_of_optimizer(Kept kept) { return kept == Kept::state1 || kept == Kept::state2; }
    static std::size_t number_of(Kept kept) { return kept == Kept::state1 ? 0 : 1; }
    const UpdateState& state(int unit, Kept kept) const { return buffers(unit).state[number_of(kept)]; }
    const EightBitTable& table(Kept kept) const {
        return table_in_8_bits(optimizer().state[number_of(kept)].has_sign);
    }
    bool is_on_disk(int unit, Kept kept) const { return is_state_on_disk() && is_state(unit, kept); }
    bool is_in_8_bits(int unit, Kept kept) const {
        return is_of_optimizer(kept) && state(unit, kept).values.dtype == DType::uint8;
    }

    void require_finished() const;
    bool is_state(int unit, Kept kept) const {
        return is_of_optimizer(kept) || (kept == Kept::master && has_master(unit));
    }
    // The device whose memory has the optimizer state, or what passes through it, and what an update reads and writes.
    Device& updating_device() const { return sharding_.offload.updates_on_host() ? device_.host() : device_; }
    // The device that has them, and the buffer there.
    Device& device_of(int unit, Kept kept) const;
    Tensor held(int unit, Kept kept) const;
    static Tensor held(const UnitBuffers& of, Kept kept);
    // A unit's parameters that are offloaded: what transfers to the disk use, and their buffer on the device.
    Tensor on_disk(int unit) const;
    Tensor on_device(int unit) const;
    bool are_offloaded(int unit) const { return are_parameters_offloaded(sharding_, unit, part_); }
    void store_parameters(int unit) const;
    bool is_of_parameters(int unit, Kept kept) const {
        return kept == Kept::whole_parameters || kept == Kept::parameters ||
               (kept == Kept::master && !has_master(unit));
    }
    // Reads or writes some elements of a piece outside a step.
    void transfer_part(int unit, int piece, Kept kept, const ElementRange& part, bool writes) const;
    // Calls f(a part of the run, its elements in memory) for each piece on disk that has one: they are read before, or
    // written after.
    template <class F>
    void for_each_piece(int unit, Kept kept, const ElementRange& run, bool writes, const F& f) const;

    Device& device_;
    StoreDtypes dtypes_;
    Sharding sharding_;
    StagePart part_;
    int shard_;
    bool update_is_pending_ = false;
    std::unique_ptr<ScratchFile> file_;  // null: state is in memory
    std::vector<std::vector<StatePiece>> pieces_;
    std::vector<Tensor> piece_buffers_;
    std::vector<std::optional<std::uint64_t>> parameter_places_;
    std::vector<UnitLayout> layouts_;
    std::vector<UnitBuffers> buffers_;
    std::vector<std::vector<UpdateGroup>> groups_;
    DirectionBuffers<Tensor> directions_{};
};

}  // namespace llmc
