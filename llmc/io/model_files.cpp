#include "llmc/io/model_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/io/foreign_files.h"
#include "llmc/io/safetensors.h"
#include "llmc/io/tensor_names.h"
#include "llmc/io/weight_files.h"
#include "llmc/optim/formulas.h"

namespace llmc {

namespace {

// One kind of tensor in a file: what of every unit. State has the suffix that the tensor's optimizer gives it.
struct Kind {
    Kept kept;
    int state = -1;  // its number; -1: not of the optimizer

    // Nothing for a tensor that has none.
    std::optional<std::string> suffix(const Optimizer& optimizer) const {
        if (state < 0) return "";
        if (state >= std::ssize(optimizer.state)) return std::nullopt;
        return fmt::format(".{}", optimizer.state[static_cast<std::size_t>(state)].name);
    }
};
const Kind weights{Kept::master};

std::vector<Kind> kinds_of_state(const ParameterStore& store) {
    std::vector<Kind> kinds;
    for (int i = 0; i < store.dtypes().states(); ++i)
        kinds.push_back({kept_state(static_cast<std::size_t>(i)), i});
    return kinds;
}

bool is_of_optimizer(std::string_view name) {
    return std::ranges::any_of(all_optimizers, [&](const Optimizer* optimizer) {
        return std::ranges::any_of(optimizer->state, [&](const StateTensor& state) {
            return name.ends_with(fmt::format(".{}", state.name));
        });
    });
}

Shape file_shape(const ParamSpec& spec) {
    const std::int64_t columns = spec.shape.last();
    const std::int64_t rows = spec.shape.elements() / columns;
    if (spec.is_vector) return {spec.shape.elements()};
    return spec.transposed_in_files ? Shape{columns, rows} : Shape{rows, columns};
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

template <class Number>
std::span<Number> tensor_of(std::span<Number> flat, const UnitLayout::Entry& entry) {
    return flat.subspan(static_cast<std::size_t>(entry.offset),
                        static_cast<std::size_t>(entry.spec.shape.elements()));
}

// The tensors of a file, with kinds in their order. `dtype` is the format's name of that of all elements.
std::vector<SafetensorsEntry> table_of(const ParameterStore& store, const UnitTransfer& transfer,
                                       std::span<const Kind> kinds, const char* dtype) {
    const Model::Files& files = store.part().outline->files;
    std::vector<SafetensorsEntry> table;
    for (const Kind& kind : kinds) {
        for (int number = 0; number < store.units(); ++number) {
            const UnitLayout& unit = transfer.units()[static_cast<std::size_t>(number)];
            for (const UnitLayout::Entry& entry : unit.entries())
                if (const auto suffix = kind.suffix(store.optimizer_of(number, entry.spec)))
                    table.push_back({files.name_in_file(unit.full_name(entry.spec)) + *suffix, dtype,
                                     file_shape(entry.spec)});
        }
    }
    return table;
}

// Calls f(kind, unit, flat) on the root, for all units of each kind in turn.
template <class F>
void collect_all(const ParameterStore& store, UnitTransfer& transfer, std::span<const Kind> kinds, F&& f) {
    for (const Kind& kind : kinds) {
        for (int unit = 0; unit < store.units(); ++unit) {
            const std::span<const float> flat = transfer.collect(unit, kind.kept);
            if (transfer.is_root()) f(kind, unit, flat);
        }
    }
}

// Calls f(name in the file, values) on the root, in the order of the table.
template <class F>
void collect_tensors(const ParameterStore& store, UnitTransfer& transfer, std::span<const Kind> kinds,
                     F&& f) {
    const Model::Files& files = store.part().outline->files;
    std::vector<float> transposed;
    collect_all(store, transfer, kinds, [&](const Kind& kind, int unit, std::span<const float> flat) {
        const UnitLayout& layout = transfer.units()[static_cast<std::size_t>(unit)];
        for (const UnitLayout::Entry& entry : layout.entries()) {
            const auto suffix = kind.suffix(store.optimizer_of(unit, entry.spec));
            if (!suffix) continue;
            std::span<const float> values = tensor_of(flat, entry);
            if (entry.spec.transposed_in_files) {
                const std::int64_t columns = entry.spec.shape.last();
                transposed.resize(values.size());
                transpose(transposed, values, entry.spec.shape.elements() / columns, columns);
                values = transposed;
            }
            f(files.name_in_file(layout.full_name(entry.spec)) + *suffix, values);
        }
    });
}

void save(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
          std::span<const Kind> kinds, bool sync) {
    if (!transfer.is_root()) return collect_all(store, transfer, kinds, [](auto&&...) {});
    SafetensorsWriter writer(file, table_of(store, transfer, kinds, "F32"));
    collect_tensors(store, transfer, kinds, [&](const std::string& name, std::span<const float> values) {
        writer.append(name, std::as_bytes(values));
    });
    writer.finish(sync);
}

// A model's file, which maps this program's tensors to the file's names.
class ModelFile {
  public:
    ModelFile(const std::filesystem::path& path, const Outline& outline)
        : path_(path),
          outline_(outline),
          reader_(path),
          names_(path, reader_.entries(), outline.files.prefix) {
        for (const Outline::OutlinedUnit& unit : outline.units) {
            for (const ParamSpec& param : unit.spec.params) known_.insert(unit.spec.name + "." + param.name);
        }
    }

    // What would do if the tensors are not those of the model: a folder's config.json describes it.
    std::string remedy(std::string_view for_file) const {
        return std::string(is_model_folder(path_) ? of_folder : for_file);
    }
    static constexpr std::string_view
        of_other_sizes = "give the sizes of the file's model",
        of_folder = "leave out options that change what its config.json says, or get the folder again";

    const std::filesystem::path& path() const { return path_; }
    const WeightFiles& reader() const { return reader_; }

    // The name of a tensor in the file. An untied head that the file lacks begins as a copy of the table. A tied
    // head is the table, and programs save such a table by either name. UserError if there is no such tensor.
    std::string name_of(const std::string& name) const {
        if (const auto found = names_.in_file(name)) return *found;
        if (copies_table() && name == files().head) return name_of(files().table);
        if (has_table_as_head() && name == files().table) return *names_.in_file(files().head);
        refuse_missing(name);
    }

    std::vector<std::string> notes() const {
        std::vector<std::string> notes;
        if (!reader_.note().empty()) notes.push_back(reader_.note());
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
        for (const std::string& name : known_) names.insert(reader_.entry(name_of(name)).dtype);
        for (const DType dtype : {DType::bf16, DType::fp16}) {
            if (names == std::set{std::string(traits_of(dtype).file_name)}) return dtype;
        }
        return DType::fp32;
    }

    // UserError for a tensor that this model does not have.
    void check_names() const {
        for (const auto& [name, in_file] : names_.all()) {
            if (is_ignored(name) || name == files().head || known_.contains(name)) continue;
            if (is_of_optimizer(name))
                user_error("{} holds an optimizer's state, not weights; give the model.safetensors beside it",
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
    // A separate head must not be lost silently. If the model has none, the file's head must equal the table.
    void check_tied_head() const {
        const std::optional<std::string> head = names_.in_file(files().head);
        if (known_.contains(files().head) || !head) return;
        const std::string table = name_of(files().table);
        const Shape& shape = reader_.entry(*head).shape;
        if (shape == reader_.entry(table).shape) {
            std::vector<float> a(static_cast<std::size_t>(shape.elements())), b(a.size());
            reader_.read(*head, std::span<float>(a));
            reader_.read(table, std::span<float>(b));
            if (a == b) return;
        }
        user_error("{}: {} differs from {}, but this model's head shares that table{}", path_.string(), *head,
                   table, files().untied_head.empty() ? "" : fmt::format("; try {}", files().untied_head));
    }

  private:
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
        return known_.contains(files().head) && !names_.contains(files().head) && !is_model_folder(path_);
    }
    bool has_table_as_head() const {
        return !known_.contains(files().head) && names_.contains(files().head) &&
               !names_.contains(files().table);
    }
    [[noreturn]] void refuse_missing(const std::string& name) const {
        const std::string fault =
            fmt::format("{}: there is no tensor {}", path_.string(), in_quotes(files().name_in_file(name)));
        if (name == files().head && is_model_folder(path_) && !files().untied_head.empty())
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
        if (is_model_folder(path_)) user_error("{}; {}", fault, of_folder);
        user_error("{}", fault);
    }

    std::filesystem::path path_;
    const Outline& outline_;
    WeightFiles reader_;
    TensorNames names_;
    std::set<std::string> known_;
};

// A weight that is not finite would make every loss nan.
void check_finite(const std::filesystem::path& file, const std::string& name, std::span<const float> values,
                  const Shape& shape) {
    const auto found = std::ranges::find_if(values, [](float x) { return !std::isfinite(x); });
    if (found == values.end()) return;
    std::int64_t rest = found - values.begin();
    std::string index;
    for (int i = shape.dimensions() - 1; i >= 0; --i) {
        index = fmt::format("{}{}{}", rest % shape[i], index.empty() ? "" : ", ", index);
        rest /= shape[i];
    }
    user_error("{}: {} is not finite ({} at ({})), so no loss would be finite; give other weights",
               file.string(), name, *found, index);
}

void check_shape(const ModelFile& model, const std::string& name, const ParamSpec& spec) {
    const Shape expected = file_shape(spec);
    const Shape found = model.reader().entry(name).shape;
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

// Reads a unit's tensors of one kind into its flat buffer.
void read_unit(const ModelFile& model, const ParameterStore& store, int unit, const UnitLayout& layout,
               const Kind& kind, std::span<float> flat) {
    const std::filesystem::path& file = model.path();
    const WeightFiles& reader = model.reader();
    std::vector<float> transposed;
    for (const UnitLayout::Entry& entry : layout.entries()) {
        const auto suffix = kind.suffix(store.optimizer_of(unit, entry.spec));
        if (!suffix) continue;
        const std::string name = model.name_of(layout.full_name(entry.spec) + *suffix);
        const Shape expected = file_shape(entry.spec);
        check_shape(model, name, entry.spec);
        const std::span<float> values = tensor_of(flat, entry);
        if (entry.spec.transposed_in_files) {
            transposed.resize(values.size());
            reader.read(name, std::span<float>(transposed));
            check_finite(file, name, transposed, expected);
            transpose(values, transposed, expected[0], expected[1]);
        } else {
            reader.read(name, values);
            check_finite(file, name, values, expected);
        }
    }
}

// The part of a unit that this rank updates; empty if its stage does not have the unit. Valid until the next call.
// `file` is null except on the root.
std::span<const float> load_unit(const ModelFile* file, const ParameterStore& store, UnitTransfer& transfer,
                                 const Kind& kind, int unit) {
    const std::span<float> whole = transfer.whole(unit);
    if (file) read_unit(*file, store, unit, transfer.units()[static_cast<std::size_t>(unit)], kind, whole);
    return transfer.distribute(unit);
}

std::unique_ptr<const ModelFile> open_on_root(const std::filesystem::path& file, const ParameterStore& store,
                                              const UnitTransfer& transfer) {
    return transfer.is_root() ? std::make_unique<const ModelFile>(file, *store.part().outline) : nullptr;
}

}  // namespace

std::vector<SafetensorsEntry> weights_table(const ParameterStore& store, const UnitTransfer& transfer,
                                            const char* dtype) {
    return table_of(store, transfer, std::span(&weights, 1), dtype);
}

void collect_weights(const ParameterStore& store, UnitTransfer& transfer, const SeeTensor& f) {
    collect_tensors(store, transfer, std::span(&weights, 1), f);
}

void save_tensors(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
                  Kept kept, bool sync) {
    const Kind kind{kept};
    save(file, store, transfer, std::span(&kind, 1), sync);
}

CheckedWeights check_weights(const std::filesystem::path& path, const Outline& outline,
                             std::span<const UnitLayout> units) {
    const ModelFile file(path, outline);
    file.check_names();
    for (const UnitLayout& unit : units) {
        for (const UnitLayout::Entry& entry : unit.entries())
            check_shape(file, file.name_of(unit.full_name(entry.spec)), entry.spec);
    }
    return {file.notes(), file.dtype()};
}

void load_weights(const std::filesystem::path& path, ParameterStore& store, UnitTransfer& transfer) {
    const auto file = open_on_root(path, store, transfer);
    if (file) {
        file->check_names();
        file->check_tied_head();
    }
    for (int unit = 0; unit < store.units(); ++unit) {
        const std::span<const float> own = load_unit(file.get(), store, transfer, weights, unit);
        if (store.has(unit)) store.set_weights(unit, own);
    }
}

void save_state(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
                bool sync) {
    save(file, store, transfer, kinds_of_state(store), sync);
}

void load_state(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer) {
    const auto opened = open_on_root(file, store, transfer);
    const std::vector<Kind> kinds = kinds_of_state(store);
    LoadedState loaded;
    for (int unit = 0; unit < store.units(); ++unit) {
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            const std::span<const float> own = load_unit(opened.get(), store, transfer, kinds[i], unit);
            loaded[i].assign(own.begin(), own.end());
        }
        if (!store.has(unit)) continue;
        if (store.optimizer().mend) store.optimizer().mend(loaded);
        for (std::size_t i = 0; i < kinds.size(); ++i) store.set_state(unit, kinds[i].kept, loaded[i]);
    }
}

}  // namespace llmc
