// Compiled programs run one after the other, without Python in between: its lock is free meanwhile, so that other
// threads of the process can send responses. See corolla.model.program_chain.

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

using Loader = torch::inductor::AOTIModelPackageLoader;
using Tensors = std::vector<at::Tensor>;

// A package is unpacked and loaded once, whoever runs it.
std::shared_ptr<Loader> load(const std::string& file) {
  static std::mutex guard;
  static std::map<std::string, std::weak_ptr<Loader>> loaded;
  const std::lock_guard<std::mutex> lock(guard);
  std::shared_ptr<Loader> loader = loaded[file].lock();
  if (!loader) loaded[file] = loader = std::make_shared<Loader>(file);
  return loader;
}

class ProgramChain : public torch::CustomClassHolder {
 public:
  // Program i is in files[i]; own[i] are the inputs that it gets in every run.
  ProgramChain(const std::vector<std::string>& files, std::vector<Tensors> own) : own_(std::move(own)) {
    TORCH_CHECK(!files.empty() && files.size() == own_.size(), "ProgramChain: ", files.size(), " programs and inputs of ",
                own_.size());
    for (const std::string& file : files) programs_.push_back(load(file));
  }

  // Programs `first` up to `end`. Each gets the first output of the one before, the first one `carried`; then `shared`,
  // its own inputs and its tensor of `each` if there are any. Returns the outputs of the last one.
  Tensors run(at::Tensor carried, const Tensors& shared, const Tensors& each, int64_t first, int64_t end) const {
    const int64_t count = programs_.size(), tensors = each.size();
    TORCH_CHECK(0 <= first && first < end && end <= count && (!tensors || tensors == end - first), "ProgramChain: ",
                tensors, " tensors for programs ", first, " to ", end, " of ", count);
    Tensors outputs;
    for (int64_t i = first; i < end; ++i) {
      Tensors inputs{carried};
      inputs.insert(inputs.end(), shared.begin(), shared.end());
      inputs.insert(inputs.end(), own_[i].begin(), own_[i].end());
      if (tensors) inputs.push_back(each[i - first]);
      outputs = programs_[i]->boxed_run(std::move(inputs));
      carried = outputs[0];
    }
    return outputs;
  }

 private:
  std::vector<std::shared_ptr<Loader>> programs_;
  std::vector<Tensors> own_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(corolla, library) {
  library.class_<ProgramChain>("ProgramChain")
      .def(torch::init<std::vector<std::string>, std::vector<Tensors>>())
      .def("run", &ProgramChain::run);
}
