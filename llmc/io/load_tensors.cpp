#include "llmc/io/load_tensors.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <compare>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "llmc/comm/texts_of_ranks.h"
#include "llmc/comm/values_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/io/files.h"
#include "llmc/model/low_rank.h"

namespace llmc {

namespace {

// Blocks that are on their way at a time, so that a rank that needs all of each has room for them.
constexpr int most_in_a_round = 8;

// What a window has: weights, what is compared with them, state.
enum Slot : std::size_t { weights, compared, first_state, slots = first_state + most_states };
Slot slot_of(const WantedTensor& wanted) {
    if (wanted.is_compared) return compared;
    if (wanted.kept == Kept::master) return weights;
    return wanted.kept == Kept::state1 ? first_state : static_cast<Slot>(first_state + 1);
}

// A box of a tensor that is wanted.
struct Item {
    const WantedTensor* wanted;
    const StoredBox* stored;
    bool is_transposed;
    Box in_file;  // in the whole tensor, as the file has it
    std::uint64_t element_bytes;

    std::int64_t elements() const { return in_file.elements(); }
    std::uint64_t end() const {
        return stored->position + static_cast<std::uint64_t>(elements()) * element_bytes;
    }
    // Its first element that begins at this byte of the file or later.
    std::int64_t first_from(std::uint64_t byte) const {
        if (byte <= stored->position) return 0;
        return std::min(elements(), static_cast<std::int64_t>((byte - stored->position + element_bytes - 1) /
                                                              element_bytes));
    }
    std::uint64_t position(std::int64_t element) const {
        return stored->position + static_cast<std::uint64_t>(element) * element_bytes;
    }
    // The number of an element of the whole tensor, as the file has it, in the box.
    std::int64_t number(std::int64_t row, std::int64_t column) const {
        return (row - in_file.row) * in_file.columns + column - in_file.column;
    }
};

// The elements of an item that begin in a block of its file.
struct ItemRun {
    const Item* item;
    ElementRange run;

    // As boxes of the whole tensor, in the program's orientation, which have the elements in their order in the file.
    std::vector<Box> boxes() const {
        std::vector<Box> found = boxes_of_run(item->in_file.columns, run);
        for (Box& box : found) {
            box.row += item->in_file.row;
            box.column += item->in_file.column;
            if (item->is_transposed) box = box.transposed();
        }
        return found;
    }
};

// A unit, a tensor of it, and a row of the tensor.
using Place = std::array<std::int64_t, 3>;
constexpr Place last_place = {std::numeric_limits<std::int64_t>::max(), 0, 0};

struct Block {
    std::size_t file = 0;
    std::uint64_t begin = 0, end = 0;  // bytes of the file
    std::vector<ItemRun> runs;
    Place order;  // of its first number
};

// A part of the elements that this rank updates of a unit, until all its numbers are there.
struct Window {
    std::array<std::vector<float>, slots> values;
    std::int64_t missing = 0;
};

class Loader {
  public:
    Loader(const StoredTensors& files, std::span<const WantedTensor> wanted, const ModelPlaces& places,
           ParameterStore& store, Communicator& world, bool mends)
        : files_(files), places_(places), store_(store), world_(world), mends_(mends) {
        check(places.mesh().world() == world.size(), "the mesh has the ranks of the communicator");
        for (const WantedTensor& tensor : wanted) wanted_[tensor.unit].push_back(&tensor);
        make_items(wanted);
        make_blocks();
    }

    // Whether what is compared is equal on this rank.
    bool load() {
        together(world_, [&] { set_windows_without_numbers(); });
        const std::size_t round = static_cast<std::size_t>(std::min(world_.size(), most_in_a_round));
        for (std::size_t first = 0; first < blocks_.size(); first += round)
            pass_on(first, std::min(blocks_.size() - first, round));
        check(windows_.empty(), "all numbers of the tensors have arrived");
        return is_equal_;
    }

    // Of the frozen weights that this rank has read.
    std::uint64_t checksum() const { return checksum_; }

  private:
    void make_items(std::span<const WantedTensor> wanted) {
        for (const WantedTensor& tensor : wanted) {
            const ParamSpec& spec = places_.spec(tensor.unit, tensor.entry);
            check(tensor.stored->shape == file_shape(spec), "a tensor that is loaded has the model's shape");
            for (const StoredBox& box : tensor.stored->boxes) {
                if (!is_number_dtype(box.dtype))
                    user_error("{}: tensor {} has the dtype {}; it must be F64, F32, F16 or BF16",
                               files_.files()[box.file].path.string(), in_quotes(tensor.name), box.dtype);
                const Box in_file = spec.is_vector
                                        ? Box{box.offsets[0], 0, box.shape[0], 1}
                                        : Box{box.offsets[0], box.offsets[1], box.shape[0], box.shape[1]};
                if (in_file.elements() == 0) continue;
                items_.push_back(
                    {&tensor, &box, spec.transposed_in_files, in_file, element_bytes(box.dtype)});
            }
        }
    }

    // The blocks in the order of the model, so that few windows are open at a time.
    void make_blocks() {
        std::map<std::pair<std::size_t, std::uint64_t>, Block> found;
        // Of a file with checksums, all blocks are verified, also those of a long header.
        for (std::size_t file = 0; file < files_.files().size(); ++file) {
            for (std::size_t number = 0; number < files_.files()[file].checksums.size(); ++number) {
                const std::uint64_t begin = number * checksum_block;
                found[{file, number}] = {file, begin, begin + checksum_block, {}, last_place};
            }
        }
        for (const Item& item : items_) {
            for (std::uint64_t number = item.stored->position / checksum_block;
                 number * checksum_block < item.end(); ++number) {
                const std::uint64_t begin = number * checksum_block, end = begin + checksum_block;
                const ElementRange run{item.first_from(begin), item.first_from(end)};
                if (run.size() == 0) continue;
                const std::int64_t row = item.is_transposed
                                             ? item.in_file.column
                                             : item.in_file.row + run.begin / item.in_file.columns;
                const Place order = {item.wanted->unit, static_cast<std::int64_t>(item.wanted->entry), row};
                Block& block = found
                                   .try_emplace({item.stored->file, number},
                                                Block{item.stored->file, begin, end, {}, order})
                                   .first->second;
                block.runs.push_back({&item, run});
                block.order = std::min(block.order, order);
            }
        }
        for (auto& [place, block] : found) {
            const StoredFile& file = files_.files()[block.file];
            // A block that is verified is read as a whole; otherwise, what is wanted of it.
            const bool is_verified = !file.checksums.empty();
            std::uint64_t begin = block.end, end = 0;
            for (const ItemRun& of : block.runs) {
                begin = std::min(begin, of.item->position(of.run.begin));
                end = std::max(end,
                               of.item->position(of.run.end));  // its last element may end in the next block
            }
            if (!is_verified) block.begin = begin;
            block.end = is_verified ? std::max(std::min(block.end, file.bytes), end) : end;
            blocks_.push_back(std::move(block));
        }
        std::ranges::stable_sort(blocks_, {}, &Block::order);
    }

    // ---- reading

    std::vector<std::byte> read(const Block& block) {
        const StoredFile& file = files_.files()[block.file];
        std::vector<std::byte> bytes(block.end - block.begin);
        InputFile(file.path).read_at(block.begin, bytes);
        if (!file.checksums.empty())
            require_checksum(file, block.begin,
                             std::span(bytes).first(std::min<std::size_t>(bytes.size(), checksum_block)));
        std::vector<float> values;
        for (const ItemRun& of : block.runs) {
            values.resize(static_cast<std::size_t>(of.run.size()));
            to_floats(of.item->stored->dtype, bytes_of(of, block, bytes), values);
            require_finite(of, values);
            const WantedTensor& wanted = *of.item->wanted;
            if (wanted.kept == Kept::master && !wanted.is_compared && store_.is_frozen(wanted.unit))
                checksum_ += sum_of(of, values);
        }
        return bytes;
    }

    // A number for each element, which mixes the tensor's name, the element's place in it and its value.
    std::uint64_t sum_of(const ItemRun& of, std::span<const float> values) const {
        const WantedTensor& wanted = *of.item->wanted;
        const UnitLayout& layout = places_.layout(wanted.unit, 0);
        const std::string name = without_nf4(layout.full_name(places_.spec(wanted.unit, wanted.entry)));
        const std::uint64_t seed = XXH3_64bits(name.data(), name.size());
        const Box& box = of.item->in_file;
        const std::int64_t all_columns =
            wanted.stored->shape.dimensions() == 1 ? 1 : wanted.stored->shape.last();
        const bool has_whole_rows = box.columns == all_columns;  // no division for each number then
        std::uint64_t sum = 0;
#pragma omp parallel for reduction(+ : sum)
        for (std::size_t i = 0; i < values.size(); ++i) {
            const std::int64_t number = of.run.begin + static_cast<std::int64_t>(i),
                               place = has_whole_rows ? box.row * all_columns + number
                                                      : (box.row + number / box.columns) * all_columns +
                                                            box.column + number % box.columns;
            // The finaliser of MurmurHash3.
            std::uint64_t x = (seed + static_cast<std::uint64_t>(place)) * 0x9e3779b97f4a7c15U ^
                              std::bit_cast<std::uint32_t>(values[i]);
            x = (x ^ x >> 33U) * 0xff51afd7ed558ccdU;
            x = (x ^ x >> 33U) * 0xc4ceb9fe1a85ec53U;
            sum += x ^ x >> 33U;
        }
        return sum;
    }

    static std::span<const std::byte> bytes_of(const ItemRun& of, const Block& block,
                                               std::span<const std::byte> bytes) {
        return bytes.subspan(of.item->position(of.run.begin) - block.begin,
                             static_cast<std::size_t>(of.run.size()) * of.item->element_bytes);
    }

    // A weight that is not finite would make every loss nan.
    void require_finite(const ItemRun& of, std::span<const float> values) const {
        const auto found = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
        if (found == values.end()) return;
        const Box& box = of.item->in_file;
        const std::int64_t number = of.run.begin + (found - values.begin()),
                           row = box.row + number / box.columns, column = box.column + number % box.columns;
        const bool is_vector = of.item->stored->shape.dimensions() == 1;
        user_error("{}: {} is not finite ({} at ({})), so no loss would be finite; give other weights",
                   files_.named().string(), of.item->wanted->name, *found,
                   is_vector ? fmt::format("{}", row) : fmt::format("{}, {}", row, column));
    }

    // ---- passing on. Ranks know from the files' headers what each sends and receives.

    // Calls f(item, the rank's part of the tensor, a box) for all that a rank needs of a block, in one order.
    template <class F>
    void for_each_box(const Block& block, int rank, const F& f) const {
        for (const ItemRun& of : block.runs) {
            const int unit = of.item->wanted->unit;
            const std::size_t entry = of.item->wanted->entry;
            const ElementRange kept = places_.kept(unit, entry, rank);
            if (kept.size() == 0) continue;
            const TensorPart part = places_.part(unit, entry, rank % places_.mesh().tensor);
            const std::vector<Box> own = part.boxes(kept);
            for (const Box& given : of.boxes()) {
                for (const Box& needed : own) {
                    const Box both = intersection(given, needed);
                    if (both.elements() > 0) f(*of.item, part, both);
                }
            }
        }
    }

    std::size_t message_bytes(const Block& block, int rank) const {
        std::size_t bytes = 0;
        for_each_box(block, rank, [&](const Item& item, const TensorPart&, const Box& box) {
            bytes += static_cast<std::size_t>(box.elements()) * item.element_bytes;
        });
        return bytes;
    }

    std::vector<std::byte> message(const Block& block, std::span<const std::byte> bytes, int rank) const {
        std::vector<std::byte> made;
        made.reserve(message_bytes(block, rank));
        for_each_box(block, rank, [&](const Item& item, const TensorPart&, const Box& needed) {
            const Box box = item.is_transposed ? needed.transposed() : needed;
            for (std::int64_t row = box.row; row < box.end_row(); ++row) {
                const std::uint64_t begin = item.position(item.number(row, box.column)) - block.begin;
                const auto run =
                    bytes.subspan(begin, static_cast<std::size_t>(box.columns) * item.element_bytes);
                made.insert(made.end(), run.begin(), run.end());
            }
        });
        return made;
    }

    // Ranks with the same elements get the same message.
    std::array<int, 3> kind_of(int rank) const {
        Mesh there = places_.mesh();
        there.rank = rank;
        return {there.stage(), there.tensor_rank(),
                there.sharding.keeps_optimizer_whole() ? 0 : there.shard()};
    }

    void pass_on(std::size_t first, std::size_t count) {
        const auto ranks = static_cast<std::size_t>(world_.size()),
                   rank = static_cast<std::size_t>(world_.rank());
        const auto reader = [&](std::size_t block) { return block % ranks; };
        std::vector<std::byte> bytes;
        together(world_, [&] {
            for (std::size_t block = first; block < first + count; ++block)
                if (reader(block) == rank) bytes = read(blocks_[block]);
        });
        std::map<std::array<int, 3>, std::vector<std::byte>> messages;
        std::vector<std::vector<std::byte>> received(count);
        const auto tensor = [](std::vector<std::byte>& of) {
            return Tensor{of.data(), DType::uint8, {std::ssize(of)}};
        };
        if (ranks > 1) world_.group_begin();
        for (std::size_t block = first; block < first + count; ++block) {
            std::vector<std::byte>& own = received[block - first];
            if (reader(block) != rank) {
                own.resize(message_bytes(blocks_[block], world_.rank()));
                world_.recv(tensor(own), static_cast<int>(reader(block)));
                continue;
            }
            own = message(blocks_[block], bytes, world_.rank());
            for (int to = 0; to < world_.size(); ++to) {
                if (to == world_.rank()) continue;
                const auto [found, is_new] = messages.try_emplace(kind_of(to));
                if (is_new) found->second = message(blocks_[block], bytes, to);
                world_.send(tensor(found->second), to);
            }
        }
        if (ranks > 1) world_.group_end();
        together(world_, [&] {
            for (std::size_t block = first; block < first + count; ++block)
                take(blocks_[block], received[block - first]);
        });
    }

    void take(const Block& block, std::span<const std::byte> bytes) {
        std::vector<float> values;
        for_each_box(block, world_.rank(), [&](const Item& item, const TensorPart& part, const Box& needed) {
            const WantedTensor& wanted = *item.wanted;
            const std::int64_t first = first_of(wanted);
            const Box box = item.is_transposed ? needed.transposed() : needed;
            values.resize(static_cast<std::size_t>(box.columns));
            for (std::int64_t row = box.row; row < box.end_row(); ++row) {
                const std::size_t size = values.size() * item.element_bytes;
                to_floats(item.stored->dtype, bytes.first(size), values);
                bytes = bytes.subspan(size);
                if (item.is_transposed) {
                    put(wanted, first + part.number(box.column, row), values, part.columns());
                } else {
                    put(wanted, first + part.number(row, box.column), values, 1);
                }
            }
        });
    }

    // ---- windows

    // The number of a tensor's first element among those that this rank updates of the unit.
    std::int64_t first_of(const WantedTensor& tensor) const {
        const UnitLayout& layout = places_.layout(tensor.unit, places_.mesh().tensor_rank());
        return layout.entries()[tensor.entry].offset - places_.updated(tensor.unit, world_.rank()).begin;
    }

    ElementRange range_of(int unit, std::int64_t window) const {
        const std::int64_t size = store_.window(unit);
        return {window * size, std::min((window + 1) * size, store_.updated(unit).size())};
    }

    Window new_window(int unit, std::int64_t number) const {
        const ElementRange range = range_of(unit, number);
        Window window;
        for (const WantedTensor* tensor : wanted_.at(unit)) {
            window.values[slot_of(*tensor)].resize(static_cast<std::size_t>(range.size()));
            const ElementRange kept = places_.kept(unit, tensor->entry, world_.rank());
            const std::int64_t first = first_of(*tensor);
            window.missing += intersection(range, {first + kept.begin, first + kept.end}).size();
        }
        return window;
    }

    // Padding has zeros.
    void set_windows_without_numbers() {
        for (const auto& [unit, tensors] : wanted_) {
            if (!store_.has(unit)) continue;
            const std::int64_t size = store_.window(unit), all = store_.updated(unit).size();
            for (std::int64_t number = 0; number * size < all; ++number) {
                Window window = new_window(unit, number);
                if (window.missing == 0) set(unit, number, window);
            }
        }
    }

    // Takes values of consecutive elements, or of those that are `stride` apart.
    void put(const WantedTensor& tensor, std::int64_t first, std::span<const float> values,
             std::int64_t stride) {
        const std::int64_t size = store_.window(tensor.unit);
        while (!values.empty()) {
            const std::int64_t number = first / size, end = (number + 1) * size;
            auto found = windows_.find({tensor.unit, number});
            if (found == windows_.end())
                found =
                    windows_.emplace(std::pair(tensor.unit, number), new_window(tensor.unit, number)).first;
            Window& window = found->second;
            float* const to = window.values[slot_of(tensor)].data() + (first - number * size);
            const std::int64_t count = std::min((end - first + stride - 1) / stride, std::ssize(values));
            for (std::int64_t i = 0; i < count; ++i) to[i * stride] = values[static_cast<std::size_t>(i)];
            values = values.subspan(static_cast<std::size_t>(count));
            first += count * stride;
            window.missing -= count;
            if (window.missing > 0) continue;
            set(tensor.unit, number, window);
            windows_.erase(found);
        }
    }

    void set(int unit, std::int64_t number, Window& window) {
        const ElementRange range = range_of(unit, number);
        const std::vector<float>& own = window.values[weights];
        if (const auto& others = window.values[compared]; !others.empty() && others != own) is_equal_ = false;
        if (!own.empty()) store_.set_weights(unit, range, own);
        LoadedState state;
        for (std::size_t i = 0; i < most_states; ++i) state[i] = std::move(window.values[first_state + i]);
        if (mends_ && store_.optimizer().mend) store_.optimizer().mend(state);
        for (std::size_t i = 0; i < most_states; ++i)
            if (!state[i].empty()) store_.set_state(unit, kept_state(i), range, state[i]);
    }

    const StoredTensors& files_;
    const ModelPlaces& places_;
    ParameterStore& store_;
    Communicator& world_;
    bool mends_, is_equal_ = true;
    std::uint64_t checksum_ = 0;
    std::map<int, std::vector<const WantedTensor*>> wanted_;  // by unit
    std::vector<Item> items_;
    std::vector<Block> blocks_;
    std::map<std::pair<int, std::int64_t>, Window> windows_;  // by unit and number
};

}  // namespace

std::string load_tensors(const StoredTensors& files, std::span<const WantedTensor> wanted,
                         const ModelPlaces& places, ParameterStore& store, Communicator& world, bool mends,
                         const std::string& differs) {
    Loader loader(files, wanted, places, store, world, mends);
    const bool is_equal = loader.load();
    together(world, [&] {
        if (!is_equal) throw UserError(differs);
    });
    const std::vector<std::uint64_t> sums =
        world.size() > 1 ? values_of_ranks(world, loader.checksum()) : std::vector{loader.checksum()};
    return fmt::format("{:016x}", std::accumulate(sums.begin(), sums.end(), std::uint64_t{0}));
}

}  // namespace llmc
