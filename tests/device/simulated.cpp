// An accelerator that is not there: tensors of their own device type, memory with a limit, and errors as
// accelerators have them. Every operation is computed by the CPU's kernel on the same memory.
//
// As on a real card: tensors of the host and of the device are not mixed (but for scalars and indices);
// allocations beyond the limit raise OutOfMemoryError; an error is raised not by the operation at fault
// but where the host waits next, and stays; the same seed draws other numbers than on the host; formats
// can be missing. `tests/simulated_device.py` compiles, loads and steers it.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using torch::jit::Stack;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;

// ------------------------------------------------------------------------------------------------
// What the device is like, and what happened on it

struct Rules {
  std::set<c10::ScalarType> not_stored, not_computed;
  std::set<std::string> of_one_dtype;
  bool sums_in_fp16 = false;
  bool has_fused_attention = true;
  bool is_plain_when_full = false;  // as mps: memory that is full is a RuntimeError
};

struct Memory {
  int64_t limit = int64_t(1) << 40, used = 0, peak = 0;
};

struct Counts {
  int64_t operations = 0, host_reads = 0, bytes_in = 0, until_fault = 0;
};

Rules rules;
Counts counts;
Memory memory[DEVICES];
std::unordered_map<void*, std::pair<DeviceIndex, int64_t>> blocks;
std::set<const void*> pinned;
std::recursive_mutex mutex;
bool is_broken = false, is_present = false;
thread_local DeviceIndex current = 0;

void wait() {
  if (is_broken) {
    throw c10::AcceleratorError(
        {__func__, __FILE__, uint32_t(__LINE__)}, 700,
        "simulated error: an illegal memory access was encountered. Errors of the device are reported "
        "asynchronously at some other call, so the stack trace may be incorrect.");
  }
}

void count_operation() {
  ++counts.operations;
  if (counts.until_fault > 0 && --counts.until_fault == 0) is_broken = true;
}

void count_read() {
  ++counts.host_reads;
  wait();
}

// ------------------------------------------------------------------------------------------------
// Memory

void give_back(void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  auto found = blocks.find(data);
  if (found == blocks.end()) return;
  memory[found->second.first].used -= found->second.second;
  blocks.erase(found);
  std::free(data);
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t wanted) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    const Device device(KIND, current);
    if (wanted == 0) return {nullptr, nullptr, &give_back, device};
    const int64_t bytes = wanted;
    Memory& here = memory[current];
    if (here.used + bytes > here.limit) {
      const auto text = c10::str(
          "simulated out of memory. Tried to allocate ", bytes, " bytes; device ", int(current), " has ",
          here.limit - here.used, " free of ", here.limit);
      TORCH_CHECK(!rules.is_plain_when_full, text);
      TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    }
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    here.used += bytes;
    here.peak = std::max(here.peak, here.used);
    blocks[data] = {current, bytes};
    return {data, data, &give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[0];
    all.current = memory[index].used, all.peak = memory[index].peak;
    stats.reserved_bytes[0] = all;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override { memory[index].peak = memory[index].used; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    return {memory[index].limit - memory[index].used, memory[index].limit};
  }
};

DeviceMemory device_memory;
REGISTER_ALLOCATOR(KIND, &device_memory)

void unpin(void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  pinned.erase(data);
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    void* data = std::malloc(std::max<size_t>(bytes, 1));
    pinned.insert(data);
    return {data, data, &unpin, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};

PinnedMemory pinned_memory;

// ------------------------------------------------------------------------------------------------
// Devices, streams, random numbers

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = KIND;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device to) const override {
    Device before(KIND, current);
    setDevice(to);
    return before;
  }
  Device getDevice() const override { return {KIND, current}; }
  void setDevice(Device to) const override {
    TORCH_CHECK(to.index() < DEVICES, "simulated error: invalid device ordinal ", int(to.index()));
    uncheckedSetDevice(to);
  }
  void uncheckedSetDevice(Device to) const noexcept override {
    if (to.index() >= 0) current = to.index();
  }
  c10::Stream getStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(Device d, int) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream exchangeStream(c10::Stream to) const override { return to; }
  DeviceIndex deviceCount() const noexcept override { return is_present ? DEVICES : 0; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait(); }
  void synchronizeEvent(void*) const override { wait(); }
  void synchronizeDevice(DeviceIndex) const override { wait(); }
  void record(void**, const c10::Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : GeneratorImpl({KIND, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator()) {
    set_current_seed(c10::default_rng_seed_val);
  }
  static c10::DeviceType device_type() { return KIND; }
  void set_current_seed(uint64_t given) override {
    known = given;
    host.set_current_seed(given * 0x9E3779B97F4A7C15ull + 1);  // other numbers than the host's
  }
  uint64_t current_seed() const override { return known; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return known;
  }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the simulated generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the simulated generator has no offset"); }
  void set_state(const c10::TensorImpl& state) override {
    host.set_state(at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(
        const_cast<c10::TensorImpl*>(&state))));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.get_state().getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto copy = new Generator(device_.index());
    copy->known = known, copy->host = host.clone();
    return copy;
  }
  uint64_t known = 0;
  at::Generator host;
};

at::Generator& default_generator(DeviceIndex index) {
  static std::vector<at::Generator> made;
  while (made.size() < DEVICES) made.push_back(at::make_generator<Generator>(DeviceIndex(made.size())));
  return made[index < 0 ? current : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return is_present; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return is_present ? DEVICES : 0; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice({KIND, index}); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice({KIND, index}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  bool isPinnedPtr(const void* data) const override { return pinned.count(data) > 0; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto fresh = storage.allocator()->allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

// ------------------------------------------------------------------------------------------------
// The same memory for kernels of the CPU, and their results for the device

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

at::Tensor view_storage(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  const auto& own = tensor.storage();
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), own.nbytes(), c10::DataPtr(own.mutable_data(), c10::kCPU), nullptr, false);
  return view_storage(storage, c10::DispatchKey::CPU, tensor);
}

at::Tensor on_device(const at::Tensor& tensor, Device device) {
  if (!tensor.defined()) return tensor;
  auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  if (tensor.numel()) on_host(made).copy_(tensor);
  return made;
}

void check_stored(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      !rules.not_stored.count(dtype), "Cannot convert a simulated Tensor to ", dtype,
      " dtype as the device doesn't support it.");
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  check_stored(c10::dtype_or_default(dtype));
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &device_memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  check_stored(c10::dtype_or_default(dtype));
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (!is_ours(to)) count_read();
  else if (!is_ours(from)) counts.bytes_in += to.nbytes();
  if (is_ours(to)) count_operation();
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto count = int64_t(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {c10::SymInt(count)}, {c10::SymInt(1)});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

// ------------------------------------------------------------------------------------------------
// Every other operation

// Of whose arguments some may be on the host: what is indexed by it.
const std::set<std::string> INDEXED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
const std::set<std::string> SIZED_BY_VALUES = {"aten::nonzero", "aten::masked_select", "aten::_unique2"};
const std::set<std::string> PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"};

struct HostCall {
  const c10::FunctionSchema& schema;
  std::string name;
  std::vector<IValue> given;                             // as the caller gave them
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // ours, and the same on the host
  std::vector<at::Tensor> scalars;                       // of the host
  std::optional<Device> device;

  explicit HostCall(const c10::FunctionSchema& schema) : schema(schema), name(schema.name()) {}

  at::Tensor take(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      if (tensor.dim() > 0) foreign = tensor.device();
      return tensor;
    }
    if (device && *device != tensor.device() && tensor.dim() > 0) foreign = tensor.device();
    if (!device) device = tensor.device();
    TORCH_CHECK(
        !rules.not_computed.count(tensor.scalar_type()), '"', name, "\" not implemented for '",
        tensor.scalar_type(), "'");
    // What is to be filled may have another size: the host makes it, and its values are taken over.
    auto host = is_written && tensor.numel() == 0 ? at::empty({0}, tensor.options().device(c10::kCPU))
                                                  : on_host(tensor);
    pairs.emplace_back(tensor, host);
    return host;
  }

  IValue take(const IValue& value, bool is_written) {
    if (value.isTensor()) return take(value.toTensor(), is_written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(take(tensor, false));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        made.push_back(tensor ? std::optional(take(*tensor, false)) : tensor);
      return made;
    }
    if (value.isDevice() && value.toDevice().type() == KIND) {
      device = value.toDevice();
      return Device(c10::kCPU);
    }
    if (value.isGenerator())  // refuses one of the host
      return at::check_generator<Generator>(value.toGenerator())->host;
    return value;
  }

  void take_all(Stack* stack) {
    const auto arguments = schema.arguments();
    const auto first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      given.push_back((*stack)[first + i]);
      const auto* alias = arguments[i].alias_info();
      (*stack)[first + i] = take(given[i], alias && alias->isWrite());
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto type = arguments[i].type()->str();
      if (type == "Generator?" && given[i].isNone() && device)
        (*stack)[first + i] = at::check_generator<Generator>(default_generator(device->index()))->host;
    }
    check();
  }

  void check() const {
    if (foreign && !INDEXED.count(name)) {
      TORCH_CHECK(
          false, "Expected all tensors to be on the same device, but found at least two devices, ",
          *device, " and ", *foreign, "! (when checking arguments of ", name, ")");
    }
    if (!rules.of_one_dtype.count(name)) return;
    std::optional<c10::ScalarType> seen;
    for (const auto& [tensor, _] : pairs) {
      if (!tensor.is_floating_point()) continue;
      TORCH_CHECK(
          !seen || *seen == tensor.scalar_type(), "expected scalar type ", *seen, " but found ",
          tensor.scalar_type(), " (", name, ")");
      seen = tensor.scalar_type();
    }
  }

  at::Tensor give(const at::Tensor& made) const {
    if (!made.defined()) return made;
    for (const auto& [own, host] : pairs)
      if (made.storage().data() == host.storage().data() && made.storage().nbytes())
        return view_storage(own.storage(), c10::DispatchKey::PrivateUse1, made);
    return on_device(made, *device);
  }

  IValue give(const IValue& made, const c10::AliasInfo* alias) {
    if (alias && alias->isWrite()) {
      for (size_t i = 0; i < given.size(); ++i) {
        const auto* other = schema.arguments()[i].alias_info();
        if (other && other->isWrite() && *other == *alias) return given[i];
      }
    }
    if (made.isTensor()) return give(made.toTensor());
    if (made.isTensorList()) {
      c10::List<at::Tensor> all;
      for (const at::Tensor& tensor : made.toTensorVector()) all.push_back(give(tensor));
      return all;
    }
    count_read();
    return made;
  }

  void give_all(Stack* stack) {
    for (auto& [own, host] : pairs) {
      if (own.numel() == 0 && host.numel() > 0) {
        own.resize_(host.sizes());
        on_host(own).copy_(host);
      }
    }
    const auto first = stack->size() - schema.returns().size();
    for (size_t i = 0; i < schema.returns().size(); ++i)
      (*stack)[first + i] = give((*stack)[first + i], schema.returns()[i].alias_info());
    if (SIZED_BY_VALUES.count(name)) count_read();
  }

 private:
  std::optional<Device> foreign;
};

// A product whose sums are rounded to fp16 after each 16 products, as accumulators of that width do.
at::Tensor sum_in_fp16(const at::Tensor& left, const at::Tensor& right) {
  auto sums = at::zeros_like(at::matmul(left.slice(-1, 0, 1), right.slice(-2, 0, 1)));
  for (int64_t at = 0; at < left.size(-1); at += 16) {
    auto part = at::matmul(
        left.slice(-1, at, at + 16).to(at::kFloat), right.slice(-2, at, at + 16).to(at::kFloat));
    sums = (sums.to(at::kFloat) + part).to(at::kHalf);
  }
  return sums;
}

bool compute_in_fp16(const HostCall& call, Stack* stack) {
  const bool asked = rules.sums_in_fp16 || at::globalContext().allowFP16AccumulationCuBLAS();
  if (!asked || !PRODUCTS.count(call.name)) return false;
  const auto count = call.schema.arguments().size();
  auto argument = [&](size_t i) { return (*stack)[stack->size() - count + i]; };
  const bool adds = call.name == "aten::addmm" || call.name == "aten::baddbmm";
  const auto left = argument(adds ? 1 : 0).toTensor(), right = argument(adds ? 2 : 1).toTensor();
  if (left.scalar_type() != at::kHalf) return false;
  auto result = sum_in_fp16(left, right);
  if (adds) {
    result = result.to(at::kFloat) * argument(4).toScalar() + argument(0).toTensor() * argument(3).toScalar();
    result = result.to(at::kHalf);
  }
  auto out = call.schema.overload_name() == "out" ? argument(count - 1).toTensor() : at::Tensor();
  if (out.defined()) result = out.resize_(result.sizes()).copy_(result);
  torch::jit::drop(*stack, count);
  stack->push_back(result);
  return true;
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  HostCall call(op.schema());
  count_operation();
  call.take_all(stack);
  if (!compute_in_fp16(call, stack)) op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.give_all(stack);
}

// Operations that have no kernel of this name on the CPU: another one computes them.

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  HostCall call(op.schema());
  count_operation();
  auto x = call.take(input, false), w = call.take(weight, false);
  auto b = bias ? std::optional(call.take(*bias, false)) : bias;
  call.check();
  return call.give(at::convolution_symint(
      x, w, b, stride, padding, dilation, transposed, output_padding, std::move(groups)));
}

int64_t choose_attention(
    const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
    bool, std::optional<double>, bool) {
  const auto& context = at::globalContext();
  const bool wanted = context.userEnabledFlashSDP() || context.userEnabledMemEfficientSDP();
  const bool fits = rules.has_fused_attention && query.scalar_type() != at::kDouble;
  if (wanted && fits) return int64_t(at::SDPBackend::overrideable);
  if (context.userEnabledMathSDP()) return int64_t(at::SDPBackend::math);
  return int64_t(at::SDPBackend::error);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor>
attend(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& bias, double dropout, bool is_causal, bool, std::optional<double> scale) {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::scaled_dot_product_attention", "");
  HostCall call(op.schema());
  count_operation();
  auto q = call.take(query, false), k = call.take(key, false), v = call.take(value, false);
  auto mask = bias ? std::optional(call.take(*bias, false)) : bias;
  call.check();
  const bool shares_keys = q.size(-3) != k.size(-3);  // grouped-query attention
  auto made = call.give(
      at::scaled_dot_product_attention(q, k, v, mask, dropout, is_causal, scale, shares_keys));
  return {made, {}, {}, {}, query.sym_size(-2), key.sym_size(-2), {}, {}, {}};
}

// Parameters of the host take the device's memory in place, as they do for CUDA.
bool has_compatible_type(const at::Tensor& one, const at::Tensor& other) {
  return one.layout() == c10::kStrided && other.layout() == c10::kStrided;
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define IN_16_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_32_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(IN_16_BITS)
  AT_FORALL_FP32(IN_32_BITS)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  for (auto name : {"native_layer_norm", "native_group_norm"})  // else they are made of smaller ones
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&compute>());
  m.impl("convolution_overrideable", convolution);
  m.impl("_fused_sdp_choice", choose_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attend);
}

// ------------------------------------------------------------------------------------------------
// What tests steer it by

TORCH_LIBRARY(simulated, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("set_limit(int device, int bytes) -> ()", [](int64_t index, int64_t bytes) { memory[index].limit = bytes; });
  m.def("read_memory(int device) -> int[]", [](int64_t index) {
    return std::vector<int64_t>{memory[index].used, memory[index].peak, memory[index].limit};
  });
  m.def("reset_peak(int device) -> ()", [](int64_t index) { memory[index].peak = memory[index].used; });
  m.def("read_counts() -> int[]", []() {
    return std::vector<int64_t>{counts.operations, counts.host_reads, counts.bytes_in};
  });
  m.def("fail_after(int operations) -> ()", [](int64_t operations) {
    is_broken = false;
    counts.until_fault = operations;
  });
  m.def("wait() -> ()", []() { wait(); });
  m.def("is_present() -> bool", []() { return is_present; });
  m.def("set_present(bool present) -> ()", [](bool present) { is_present = present; });
  m.def("seed(int device, int seed) -> ()", [](int64_t index, int64_t seed) {
    default_generator(index).set_current_seed(seed);
  });
  m.def("read_rng(int device) -> Tensor", [](int64_t index) { return default_generator(index).get_state(); });
  m.def("put_rng(int device, Tensor state) -> ()", [](int64_t index, const at::Tensor& state) {
    default_generator(index).set_state(state);
  });
  m.def(
      "set_rules(str[] of_one_dtype, bool fp16_sums, bool fused, bool plain_when_full) -> ()",
      [](const std::vector<std::string>& of_one_dtype, bool fp16_sums, bool fused, bool plain_when_full) {
        rules = {{}, {}, {of_one_dtype.begin(), of_one_dtype.end()}, fp16_sums, fused, plain_when_full};
      });
  m.def("lack(ScalarType dtype) -> ()", [](c10::ScalarType dtype) { rules.not_stored.insert(dtype); });
  m.def("not_compute(ScalarType dtype) -> ()", [](c10::ScalarType dtype) { rules.not_computed.insert(dtype); });
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention);
}
