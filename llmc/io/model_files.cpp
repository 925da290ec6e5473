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
#include "llmc/io/foreign_files.h"
#include "llmc/io/load_tensors.h"
#include "llmc/io/own_files.h"
#include "llmc/io/safetensors.h"
#include "llmc/io/tensor_names.h"
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

// Calls f(name in the file, values) on the root, in the order of the table.
template <class F>
void collect_tensors(const ParameterStore& store, UnitTransfer& transfer, Kept kept, F&& f) {
    const Model::Files& files = store.part().outline->files;
    std::vector<float> transposed;
    for (int unit = 0; unit < store.units(); ++unit) {
        const std::span<const float> flat = transfer.collect(unit, kept);
        if (!transfer.is_root()) continue;
        const UnitLayout& layout = transfer.units()[static_cast<std::size_t>(unit)];
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

// A model's stored tensors, which maps this program's tensors to the files' names.
class ModelFile {
  public:
    ModelFile(const StoredTensors& stored, const Outline& outline)
        : path_(stored.named()),
          outline_(outline),
          stored_(stored),
          names_(path_, names_of_weights(stored), outline.files.prefix) {
        for (const Outline::OutlinedUnit& unit : outline.units) {
            for (const ParamSpec& param : unit.spec.params) known_.insert(unit.spec.name + "." + param.name);
        }
    }

    // What would do if the tensors are not those of the model: a folder's config.json describes it.
    std::string remedy(std::string_view for_file) const {
        const bool is_of_rank = path_.filename().string().starts_with(weights_prefix);
        return std::string(stored_.is_model ? of_folder : is_of_rank ? of_checkpoint : for_file);
    }
    static constexpr std::string_view
        of_other_sizes = "give the sizes of the file's model",
        of_checkpoint = "give the folder of the checkpoint, which has the other parts of the model too",
        of_folder = "leave out options that change what its config.json says, or get the folder again";

    const std::filesystem::path& path() const { return path_; }
    const StoredTensor& tensor(const std::string& name_in_file) const {
        return stored_.tensors().find(name_in_file)->second;
    }

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

    // UserError for a tensor that this model does not have.
    void check_names() const {
        for (const auto& [name, in_file] : names_.all()) {
            if (is_ignored(name) || name == files().head || known_.contains(name)) continue;
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
        const std::optional<std::string> head = names_.in_file(files().head);
        if (known_.contains(files().head) || !head || has_table_as_head()) return std::nullopt;
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
        return !known_.contains(files().head) && names_.contains(files().head) &&
               !names_.contains(files().table);
    }
    [[noreturn]] void refuse_missing(const std::string& name) const {
        const std::string fault =
            fmt::format("{}: there is no tensor {}", path_.string(), in_quotes(files().name_in_file(name)));
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
    TensorNames names_;
    std::set<std::string> known_;
};

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
                                            const char* dtype) {
    const Model::Files& files = store.part().outline->files;
    std::vector<SafetensorsEntry> table;
    for (const UnitLayout& unit : transfer.units())
        for (const UnitLayout::Entry& entry : unit.entries())
            table.push_back({files.name_in_file(unit.full_name(entry.spec)), dtype, file_shape(entry.spec)});
    return table;
}

void collect_weights(const ParameterStore& store, UnitTransfer& transfer, const SeeTensor& f) {
    collect_tensors(store, transfer, Kept::master, f);
}

void save_tensors(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
                  Kept kept, bool sync) {
    std::optional<SafetensorsWriter> writer;
    if (transfer.is_root()) writer.emplace(file, weights_table(store, transfer, "F32"));
    collect_tensors(store, transfer, kept, [&](const std::string& name, std::span<const float> values) {
        writer->append(name, std::as_bytes(values));
    });
    if (writer) writer->finish(sync);
}

CheckedWeights check_weights(const StoredTensors& stored, const Outline& outline,
                             std::span<const UnitLayout> units) {
    const ModelFile file(stored, outline);
    file.check_names();
    for (const UnitLayout& unit : units) {
        for (const UnitLayout::Entry& entry : unit.entries())
            check_shape(file, file.name_of(unit.full_name(entry.spec)), entry.spec);
    }
    return {file.notes(), file.dtype()};
}

void load_stored(const std::function<StoredTensors()>& find, ParameterStore& store,
                 const UnitTransfer& transfer, bool with_state, bool mends) {
    const StoredTensors stored =
        StoredTensors::from_bytes(text_of_root(transfer.world(), [&] { return find().to_bytes(); }));
    const Outline& outline = *store.part().outline;
    const ModelFile model(stored, outline);
    model.check_names();
    const std::optional<std::string> head = model.head_to_compare();
    const ModelPlaces places(transfer.mesh(), transfer.parts());
    std::vector<WantedTensor> wanted;
    for (int unit = 0; unit < places.units(); ++unit) {
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
            const std::span<const StateTensor> tensors = store.optimizer_of(unit, spec).state;
            for (std::size_t i = 0; i < tensors.size(); ++i) {
                const std::string of_state = state_name(outline.files.name_in_file(name), tensors[i]);
                if (!stored.tensors().contains(of_state))
                    user_error("{}: there is no tensor {}", stored.named().string(), in_quotes(of_state));
                want(of_state, kept_state(i), false);
            }
        }
    }
    load_tensors(stored, wanted, places, store, transfer.world(), mends, head ? model.head_differs() : "");
}

void load_weights(const std::filesystem::path& path, ParameterStore& store, const UnitTransfer& transfer) {
    load_stored([&] { return find_tensors(path); }, store, transfer);
}

}  // namespace llmc
