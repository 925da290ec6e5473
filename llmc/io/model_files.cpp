#include "llmc/io/model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "llmc/comm/texts_of_ranks.h"
#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/boxes.h"
#include "llmc/io/files.h"
#include "llmc/io/foreign_files.h"
#include "llmc/io/load_tensors.h"
#include "llmc/io/own_files.h"
#include "llmc/io/safetensors.h"
#include "llmc/io/tensor_names.h"
#include "llmc/model/low_rank.h"
#include "llmc/optim/formulas.h"

namespace llmc {

namespace {

bool is_of_optimizer(std::string_view name) {
    return std::ranges::any_of(all_optimizers, [&](const Optimizer* optimizer) {
        return std::ranges::any_of(optimizer->state, [&](const StateTensor& state) {
            return name.ends_with(fmt::format(".{}", state.name));
        });
    });
}

// to (columns, rows) = the transpose of from (rows, columns).
void transpose(std::span<float> to, std::span<const float> from, std::int64_t rows, std::int64_t columns) {
#pragma omp parallel for
    for (std::int64_t j = 0; j < columns; ++j) {
        for (std::int64_t i = 0; i < rows; ++i) {
            to[static_cast<std::size_t>(j * rows + i)] = from[static_cast<std::size_t>(i * columns + j)];
        }
    }
}

std::span<const float> tensor_of(std::span<const float> flat, const UnitLayout::Entry& entry) {
    return flat.subspan(static_cast<std::size_t>(entry.offset),
                        static_cast<std::size_t>(entry.spec.shape.elements()));
}

Tensors kind_of(const UnitSpec& unit) {
    return is_of_adapter(unit.name) ? Tensors::adapters : Tensors::weights;
}

// w (out, in) += scale b (out, R) a (R, in)
void add_product(std::span<float> w, std::span<const float> b, std::span<const float> a, std::size_t rank,
                 float scale) {
    const std::size_t rows = b.size() / rank, columns = a.size() / rank;
#pragma omp parallel for
    for (std::size_t row = 0; row < rows; ++row) {
        std::vector<float> sum(columns);
        for (std::size_t r = 0; r < rank; ++r) {
            const float factor = b[row * rank + r];
#pragma omp simd
            for (std::size_t column = 0; column < columns; ++column)
                sum[column] += factor * a[r * columns + column];
        }
#pragma omp simd
        for (std::size_t column = 0; column < columns; ++column)
            w[row * columns + column] += scale * sum[column];
    }
}

// Adds to a unit's weights the products of its adapters.
void merge_adapters(std::span<float> weights, const UnitLayout& unit, std::span<const float> adapters,
                    const UnitLayout& of_adapters, double scale) {
    for (const UnitLayout::Entry& a : of_adapters.entries()) {
        if (!a.spec.name.ends_with(lora_a)) continue;
        const std::string matrix = a.spec.name.substr(0, a.spec.name.size() - lora_a.size());
        const std::string weight = fmt::format("{}.weight", matrix);
        const auto found = std::ranges::find(unit.entries(), weight,
                                             [](const UnitLayout::Entry& entry) { return entry.spec.name; });
        if (found == unit.entries().end()) continue;  // it is in another unit, in 4 bits or not
        const UnitLayout::Entry& of = *found;
        add_product(weights.subspan(static_cast<std::size_t>(of.offset),
                                    static_cast<std::size_t>(of.spec.shape.elements())),
                    tensor_of(adapters, of_adapters.entry(fmt::format("{}{}", matrix, lora_b))),
                    tensor_of(adapters, a), static_cast<std::size_t>(a.spec.shape[0]),
                    static_cast<float>(scale));
    }
}

// A model's stored tensors, which maps this program's tensors to the files' names.
class ModelFile {
  public:
    ModelFile(const StoredTensors& stored, const Outline& outline, Tensors tensors)
        : path_(stored.named()),
          outline_(outline),
          stored_(stored),
          tensors_(tensors),
          names_(path_, names_of_weights(stored), tensors == Tensors::weights ? outline.files.prefix : "") {
        for (const Outline::OutlinedUnit& unit : outline.units) {
            if (kind_of(unit.spec) != tensors) continue;
            for (const ParamSpec& param : unit.spec.params) {
                known_.insert(without_nf4(unit.spec.name + "." + param.name));
                named_.insert(name_in_names(unit.spec.name + "." + param.name));
            }
        }
    }

    // What would do if the tensors are not those of the model: a folder's config.json describes it.
    std::string remedy(std::string_view for_file) const {
        if (tensors_ == Tensors::adapters) return std::string(of_adapter);
        const bool is_of_rank = path_.filename().string().starts_with(weights_prefix);
        return std::string(stored_.is_model ? of_folder : is_of_rank ? of_checkpoint : for_file);
    }
    static constexpr std::string_view
        of_other_sizes = "give the sizes of the file's model",
        of_adapter = "give an adapter of this model",
        of_checkpoint = "give the folder of the checkpoint, which has the other parts of the model too",
        of_folder = "leave out options that change what its config.json says, or get the folder again";

    const std::filesystem::path& path() const { return path_; }
    const StoredTensor& tensor(const std::string& name_in_file) const {
        return stored_.tensors().find(name_in_file)->second;
    }

    // The name of a tensor in the file. An untied head that the file lacks begins as a copy of the table. A tied
    // head is the table, and programs save such a table by either name. UserError if there is no such tensor.
    std::string name_of(const std::string& full_name) const {
        const std::string name = without_nf4(full_name);
        if (const auto found = names_.in_file(name_in_names(name))) return *found;
        if (copies_table() && name == files().head) return name_of(files().table);
        if (has_table_as_head() && name == files().table) return *names_.in_file(files().head);
        refuse_missing(name);
    }

    std::vector<std::string> notes() const {
        std::vector<std::string> notes;
        if (!stored_.note.empty()) notes.push_back(stored_.note);
        if (const std::string note = names_.note(); !note.empty()) notes.push_back(note);
        if (copies_table()) {
            notes.push_back(fmt::format("{} has no {}: the head starts as a copy of {}", path_.string(),
                                        files().head, files().table));
        }
        if (has_table_as_head()) {
            notes.push_back(fmt::format("{} has no {}: {}, the tied head, takes its place", path_.string(),
                                        files().table, files().head));
        }
        return notes;
    }

    // The narrowest dtype of exported files that holds all the model's tensors exactly; fp32 if none does.
    DType dtype() const {
        std::set<std::string> names;
        for (const std::string& name : known_)
            for (const StoredBox& box : tensor(name_of(name)).boxes) names.insert(box.dtype);
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            if (names == std::set{std::string(traits_of(dtype).file_name)}) return dtype;
        }
        return DType::fp32;
    }

    // The name of a tensor in names_: adapters have those of files.
    std::string name_in_names(const std::string& name) const {
        return tensors_ == Tensors::adapters ? files().name_in_file(name) : without_nf4(name);
    }

    // UserError for a tensor that this model does not have.
    void check_names() const {
        for (const auto& [name, in_file] : names_.all()) {
            if (named_.contains(name)) continue;
            if (tensors_ == Tensors::adapters)
                user_error("{}: {} is not a tensor of this model's adapters; {}", path_.string(),
                           in_quotes(in_file), of_adapter);
            if (is_ignored(name) || name == files().head) continue;
            if (is_of_optimizer(name))
                user_error("{} holds an optimizer's state, not weights; give the folder of the checkpoint",
                           path_.string());
            const bool is_bias =
                name.ends_with(".bias") && known_.contains(name.substr(0, name.rfind('.')) + ".weight");
            if (is_bias && !has_biases() && !files().no_biases.empty())
                user_error("{}: {} is a bias, but this model has no biases; {}", path_.string(),
                           in_quotes(in_file), remedy(fmt::format("leave out {}", files().no_biases)));
            user_error("{}: {} is not a tensor of this model of {}; {}", path_.string(), in_quotes(in_file),
                       plural(std::ssize(outline_.layers), "block"), remedy(of_other_sizes));
        }
    }
    // A separate head must not be lost silently. If the model has none, the files' head must equal the table: the name
    // of such a head.
    std::optional<std::string> head_to_compare() const {
        std::optional<std::string> head = names_.in_file(files().head);
        if (tensors_ == Tensors::adapters || known_.contains(files().head) || !head || has_table_as_head())
            return std::nullopt;
        if (tensor(*head).shape != tensor(name_of(files().table)).shape) user_error("{}", head_differs());
        return head;
    }
    std::string head_differs() const {
        return fmt::format("{}: {} differs from {}, but this model's head shares that table{}",
                           path_.string(), *names_.in_file(files().head), name_of(files().table),
                           files().untied_head.empty() ? "" : fmt::format("; try {}", files().untied_head));
    }

  private:
    // A folder may have an optimizer's state beside them, as distributed checkpoints of PyTorch have.
    static std::vector<std::string> names_of_weights(const StoredTensors& stored) {
        std::vector<std::string> names;
        for (const auto& [name, tensor] : stored.tensors())
            if (!stored.is_folder || !name.starts_with(state_prefix)) names.push_back(name);
        return names;
    }
    const Model::Files& files() const { return outline_.files; }
    bool is_ignored(std::string_view name) const {
        return std::ranges::any_of(files().passed_over,
                                   [&](const std::string& end) { return name.ends_with(end); });
    }
    bool has_biases() const {
        return std::ranges::any_of(known_, [](const std::string& name) { return name.ends_with(".bias"); });
    }
    // A folder says itself whether its head is tied; a file does not.
    bool copies_table() const {
        return known_.contains(files().head) && !names_.contains(files().head) && !stored_.is_model;
    }
    bool has_table_as_head() const {
        return tensors_ == Tensors::weights && !known_.contains(files().head) &&
               names_.contains(files().head) && !names_.contains(files().table);
    }
    [[noreturn]] void refuse_missing(const std::string& name) const {
        const std::string fault =
            fmt::format("{}: there is no tensor {}", path_.string(), in_quotes(files().name_in_file(name)));
        if (tensors_ == Tensors::adapters)
            user_error("{}, and layers whose adapters differ are not computed; {}", fault, of_adapter);
        if (name == files().head && stored_.is_model && !files().untied_head.empty())
            user_error("{}; if the head shares the token embedding's weights, give --tied-head", fault);
        if (is_one_of_several_shards(path_)) user_error("{}; {}", fault, advice_for_shards());
        if (name == files().table && names_.contains(files().head) && !files().untied_head.empty()) {
            user_error("{}, only {}, so the file's head is tied; leave out {}", fault, files().head,
                       files().untied_head);
        }
        const auto is_bias = [&](const auto& names) {
            return names.first.ends_with(".bias") && !is_ignored(names.first);
        };
        if (name.ends_with(".bias") && !files().no_biases.empty() &&
            std::ranges::none_of(names_.all(), is_bias))
            user_error("{}, and no other bias; {}", fault, remedy(fmt::format("try {}", files().no_biases)));
        if (stored_.is_model) user_error("{}; {}", fault, of_folder);
        user_error("{}", fault);
    }

    std::filesystem::path path_;
    const Outline& outline_;
    const StoredTensors& stored_;
    Tensors tensors_;
    TensorNames names_;
    std::set<std::string> known_, named_;  // the model's tensors, and their names among names_
};

// A unit's weights as the files have them.
std::vector<float> read_unit(const StoredTensors& files, const ModelFile& model, const UnitLayout& unit) {
    std::vector<float> flat(static_cast<std::size_t>(unit.padded_elements(1)));
    for (const UnitLayout::Entry& entry : unit.entries()) {
        const StoredTensor& tensor = model.tensor(model.name_of(unit.full_name(entry.spec)));
        for (const StoredBox& box : tensor.boxes) {
            std::vector<float> values(static_cast<std::size_t>(box.shape.elements()));
            std::vector<std::byte> bytes(values.size() * element_bytes(box.dtype));
            InputFile(files.files()[box.file].path).read_at(box.position, bytes);
            to_floats(box.dtype, bytes, values);
            const bool is_vector = tensor.shape.dimensions() == 1;  // one row
            const std::int64_t columns = tensor.shape.last(), width = box.shape.last(),
                               row = is_vector ? 0 : box.offsets[0], column = box.offsets[is_vector ? 0 : 1];
            for (std::int64_t i = 0; i < (is_vector ? 1 : box.shape[0]); ++i)
                std::copy_n(values.begin() + i * width, width,
                            flat.begin() + entry.offset + (row + i) * columns + column);
        }
    }
    return flat;
}

// Calls f(name in the file, values) on the root, in the order of the table.
template <class F>
void collect_tensors(const ParameterStore& store, UnitTransfer& transfer, Kept kept, const Collected& what,
                     F&& f) {
    const Model::Files& files = store.part().outline->files;
    const auto layout_of = [&](int unit) -> const UnitLayout& {
        return transfer.units()[static_cast<std::size_t>(unit)];
    };
    // The unit of the adapters of a unit's matrices; -1 if it has none.
    const auto adapters_of = [&](int unit) {
        const std::string& own = layout_of(unit).name();
        const std::string name = fmt::format(
            "{}{}", own.ends_with(nf4_unit) ? own.substr(0, own.size() - nf4_unit.size()) : own, lora_unit);
        const auto found = std::ranges::find(transfer.units(), name, &UnitLayout::name);
        return found == transfer.units().end() ? -1 : static_cast<int>(found - transfer.units().begin());
    };
    std::optional<ModelFile> originals;
    if (what.originals && transfer.is_root())
        originals.emplace(*what.originals, *store.part().outline, what.tensors);
    std::vector<float> transposed, adapters, merged;
    for (int unit = 0; unit < store.units(); ++unit) {
        const UnitLayout& layout = layout_of(unit);
        if (kind_of(layout.spec()) != what.tensors) continue;
        const int of_adapters = what.merged ? adapters_of(unit) : -1;
        const bool merges = of_adapters >= 0;
        if (merges) {
            const std::span<const float> collected = transfer.collect(of_adapters, kept);
            adapters.assign(collected.begin(), collected.end());
        }
        std::span<const float> flat;
        const bool is_original = what.originals && !(what.keeps_nf4 && layout.name().ends_with(nf4_unit));
        if (!is_original) flat = transfer.collect(unit, kept);
        if (!transfer.is_root()) continue;
        if (is_original) {
            merged = read_unit(*what.originals, *originals, layout);
        } else if (merges) {
            merged.assign(flat.begin(), flat.end());
        }
        if (merges) {
            merge_adapters(merged, layout, adapters, layout_of(of_adapters), *what.merged);
        }
        if (merges || is_original) flat = merged;
        for (const UnitLayout::Entry& entry : layout.entries()) {
            std::span<const float> values = tensor_of(flat, entry);
            if (entry.spec.transposed_in_files) {
                const std::int64_t columns = entry.spec.shape.last();
                transposed.resize(values.size());
                transpose(transposed, values, entry.spec.shape.elements() / columns, columns);
                values = transposed;
            }
            f(files.name_in_file(layout.full_name(entry.spec)), values);
        }
    }
}

void check_shape(const ModelFile& model, const std::string& name, const ParamSpec& spec) {
    const Shape expected = file_shape(spec);
    const Shape& found = model.tensor(name).shape;
    if (found == expected) return;
    const std::string fault = fmt::format("{}: {} has the shape {}, but this model needs {}",
                                          model.path().string(), name, to_string(found), to_string(expected));
    if (spec.transposed_in_files && found == Shape{expected[1], expected[0]}) {
        user_error(
            "{}: this is the layout of nn.Linear; transpose the weights of all linear layers to the layout "
            "of "
            "GPT-2's Conv1D",
            fault);
    }
    user_error("{}; {}", fault, model.remedy(ModelFile::of_other_sizes));
}

}  // namespace

std::vector<SafetensorsEntry> weights_table(const ParameterStore& store, const UnitTransfer& transfer,
                                            const char* dtype, Tensors tensors) {
    const Model::Files& files = store.part().outline->files;
    std::vector<SafetensorsEntry> table;
    for (const UnitLayout& unit : transfer.units()) {
        if (kind_of(unit.spec()) != tensors) continue;
        for (const UnitLayout::Entry& entry : unit.entries())
            table.push_back({files.name_in_file(unit.full_name(entry.spec)), dtype, file_shape(entry.spec)});
    }
    return table;
}

void collect_weights(const ParameterStore& store, UnitTransfer& transfer, const Collected& what,
                     const SeeTensor& f) {
    collect_tensors(store, transfer, Kept::master, what, f);
}

void save_tensors(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
                  Kept kept, bool sync, Tensors tensors) {
    std::optional<SafetensorsWriter> writer;
    if (transfer.is_root()) writer.emplace(file, weights_table(store, transfer, "F32", tensors));
    collect_tensors(store, transfer, kept, {.tensors = tensors},
                    [&](const std::string& name, std::span<const float> values) {
                        writer->append(name, std::as_bytes(values));
                    });
    if (writer) writer->finish(sync);
}

CheckedWeights check_weights(const StoredTensors& stored, const Outline& outline,
                             std::span<const UnitLayout> units, Tensors tensors) {
    const ModelFile file(stored, outline, tensors);
    file.check_names();
    for (const UnitLayout& unit : units) {
        if (kind_of(unit.spec()) != tensors) continue;
        for (const UnitLayout::Entry& entry : unit.entries())
            check_shape(file, file.name_of(unit.full_name(entry.spec)), entry.spec);
    }
    return {file.notes(), file.dtype()};
}

std::string load_stored(const std::function<StoredTensors()>& find, ParameterStore& store,
                        const UnitTransfer& transfer, Tensors tensors, bool with_state, bool mends) {
    const StoredTensors stored =
        StoredTensors::from_bytes(text_of_root(transfer.world(), [&] { return find().to_bytes(); }));
    const Outline& outline = *store.part().outline;
    const ModelFile model(stored, outline, tensors);
    model.check_names();
    const std::optional<std::string> head = model.head_to_compare();
    const ModelPlaces places(transfer.mesh(), transfer.parts());
    std::vector<WantedTensor> wanted;
    for (int unit = 0; unit < places.units(); ++unit) {
        if (kind_of(outline.unit(unit).spec) != tensors) continue;
        for (std::size_t entry = 0; entry < places.tensors(unit); ++entry) {
            const ParamSpec& spec = places.spec(unit, entry);
            const std::string name = places.layout(unit, 0).full_name(spec);
            const auto want = [&](const std::string& in_file, Kept kept, bool is_compared) {
                check_shape(model, in_file, spec);
                wanted.push_back({in_file, &model.tensor(in_file), unit, entry, kept, is_compared});
            };
            want(model.name_of(name), Kept::master, false);
            if (head && name == outline.files.table) want(*head, Kept::master, true);
            if (!with_state) continue;
            const std::span<const StateTensor> state = store.optimizer_of(unit, spec).state;
            for (std::size_t i = 0; i < state.size(); ++i) {
                const std::string of_state = state_name(outline.files.name_in_file(name), state[i]);
                if (!stored.tensors().contains(of_state))
                    user_error("{}: there is no tensor {}", stored.named().string(), in_quotes(of_state));
                want(of_state, kept_state(i), false);
            }
        }
    }
    return load_tensors(stored, wanted, places, store, transfer.world(), mends,
                        head ? model.head_differs() : "");
}

void load_weights(const std::filesystem::path& path, ParameterStore& store, const UnitTransfer& transfer) {
    load_stored([&] { return find_tensors(path); }, store, transfer);
}

}  // namespace llmc
