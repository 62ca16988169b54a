#include "card.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <poll.h>
#include <sched.h>
#include <stdexcept>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "signal.h"

namespace weft {

namespace {

constexpr double kAwake = -std::numeric_limits<double>::infinity();
constexpr uint64_t kMostAtOnce = 1 << 20;  // bytes of one copy: others are looked after in between

[[noreturn]] void fail_with(const char* what) {
  throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

Wire* map_wire(int fd, size_t* bytes) {
  struct stat about;
  if (fstat(fd, &about) != 0) fail_with("the lab's wire");
  *bytes = size_t(about.st_size);
  if (*bytes < sizeof(Wire)) throw std::runtime_error("this file holds no wire of a lab");
  void* memory = mmap(nullptr, *bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) fail_with("mapping the lab's wire");
  return static_cast<Wire*>(memory);
}

// A card is no thread: it does not wait for a turn. Where that may not be asked for, it is an ordinary thread.
void run_as_hardware(const char* name) {
  prctl(PR_SET_NAME, name, 0, 0, 0);
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  const sched_param first{1};
  if (sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &first) != 0) {
    const sched_param none{0};
    sched_setscheduler(0, SCHED_OTHER, &none);
  }
}

}  // namespace

void make_wire(int fd, uint32_t hosts, double bytes_per_second, double latency_seconds, uint64_t chunk, uint64_t staging,
               uint32_t processes) {
  if (hosts > kMaxHosts || processes > kMaxProcesses) throw std::invalid_argument("too many hosts or ranks for a wire");
  if (ftruncate(fd, off_t(Wire::bytes(staging, processes))) != 0) fail_with("memory for the lab's wire");
  size_t bytes = 0;
  Wire* wire = map_wire(fd, &bytes);
  wire->start(hosts, bytes_per_second * 1e-9, latency_seconds * 1e9, chunk, staging);
  munmap(wire, bytes);
}

std::string why_unreadable(pid_t pid, uint64_t address) {
  char here;
  const iovec to{&here, 1}, from{reinterpret_cast<void*>(address), 1};
  return process_vm_readv(pid, &to, 1, &from, 1, 0) == 1 ? "" : std::strerror(errno);
}

Card::Card(int fd, uint32_t host) : pid_(getpid()) {
  wire_ = map_wire(fd, &bytes_);
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);  // where Yama lets nobody else read
  HeldWire held(*wire_);
  if (host >= wire_->hosts || wire_->processes == kMaxProcesses) throw std::invalid_argument("no room on the lab's wire");
  me_ = wire_->processes;
  Process& process = wire_->process[me_];
  process.pid = pid_, process.host = host, process.wakes = kAwake;
  wire_->processes++;
  held.let_go();
  deaths_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (deaths_ < 0) fail_with("eventfd");
  server_ = std::thread(&Card::serve, this);
  guard_ = std::thread(&Card::guard, this);
}

Card::~Card() {
  if (getpid() != pid_) {  // a forked child: its parent's threads are not here
    server_.detach();
    guard_.detach();
    return;
  }
  {
    HeldWire held(*wire_);
    for (uint32_t e = 0; e < wire_->endpoints; ++e)
      if (wire_->endpoint[e].process == me_) held.end(e, kClosed, Fault::kClosed, Fault::kClosed);
  }
  is_over_ = true;
  wire_->process[me_].bell++;
  futex_wake(wire_->process[me_].bell);
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t written = write(deaths_, &one, sizeof one);
  server_.join();
  guard_.join();
  for (const auto& [process, pidfd] : watched_) ::close(pidfd);
  ::close(deaths_);
  munmap(wire_, bytes_);
}

void Card::check_process() const {
  if (getpid() != pid_) throw std::runtime_error("this process was forked from one that has a card; it has none itself");
}

uint32_t Card::open() {
  check_process();
  HeldWire held(*wire_);
  if (wire_->endpoints == kMaxEndpoints) throw std::runtime_error("the lab's wire has no endpoint left for another group");
  wire_->endpoint[wire_->endpoints] = {kOpen, me_};
  return wire_->endpoints++;
}

uint32_t Card::host_of(uint32_t endpoint) {
  HeldWire held(*wire_);
  if (endpoint >= wire_->endpoints) throw std::invalid_argument("no such endpoint");
  return wire_->host_of(endpoint);
}

std::pair<uint64_t, uint64_t> Card::carried() {
  HeldWire held(*wire_);
  held.advance();
  const uint32_t host = wire_->process[me_].host;
  return {wire_->carried[2 * host], wire_->carried[2 * host + 1]};
}

void Card::watch(const std::vector<uint32_t>& endpoints) {
  check_process();
  HeldWire held(*wire_);
  std::lock_guard<std::mutex> lock(watched_mutex_);
  for (uint32_t endpoint : endpoints) {
    if (endpoint >= wire_->endpoints) throw std::invalid_argument("no such endpoint");
    const uint32_t process = wire_->endpoint[endpoint].process;
    if (process == me_ || watched_.count(process)) continue;
    const int pidfd = int(syscall(SYS_pidfd_open, wire_->process[process].pid, 0));
    if (pidfd < 0) held.bury(process);
    else watched_[process] = pidfd;
  }
  const uint64_t one = 1;
  [[maybe_unused]] ssize_t written = write(deaths_, &one, sizeof one);
}

void Card::guard() {
  prctl(PR_SET_NAME, "weft_guard", 0, 0, 0);
  while (!is_over_) {
    std::vector<pollfd> files{{deaths_, POLLIN, 0}};
    std::vector<uint32_t> who{kNobody};
    {
      std::lock_guard<std::mutex> lock(watched_mutex_);
      for (const auto& [process, pidfd] : watched_) files.push_back({pidfd, POLLIN, 0}), who.push_back(process);
    }
    if (poll(files.data(), files.size(), -1) < 0) continue;
    uint64_t count;
    [[maybe_unused]] ssize_t got = ::read(deaths_, &count, sizeof count);
    for (size_t i = 1; i < files.size(); ++i) {
      if (!files[i].revents) continue;
      {
        HeldWire held(*wire_);
        held.bury(who[i]);
      }
      std::lock_guard<std::mutex> lock(watched_mutex_);
      ::close(files[i].fd);
      watched_.erase(who[i]);
    }
  }
}

void Card::close(uint32_t endpoint) {
  if (getpid() != pid_) return;
  HeldWire held(*wire_);
  held.end(endpoint, kClosed, Fault::kClosed, Fault::kClosed);
}

void Card::give_up(uint32_t endpoint) {
  check_process();
  HeldWire held(*wire_);
  held.end(endpoint, kBroken, Fault::kOwnGaveUp, Fault::kGaveUp);
}

Handle Card::send(uint32_t from, uint32_t to, int64_t tag, uint64_t address, uint64_t bytes) {
  check_process();
  const uint64_t staged = reads_memory() || bytes == 0 ? kNotStaged : stage(address, bytes);
  Handle handle = post(kSend, from, to, tag, staged == kNotStaged ? address : staged, bytes);
  handle.staged = staged;
  return handle;
}

Handle Card::receive(uint32_t from, uint32_t to, int64_t tag, uint64_t address, uint64_t bytes) {
  check_process();
  return post(kReceive, from, to, tag, address, bytes);
}

Handle Card::post(PostKind kind, uint32_t from, uint32_t to, int64_t tag, uint64_t address, uint64_t bytes) {
  HeldWire held(*wire_);
  const uint32_t own = kind == kSend ? from : to, peer = kind == kSend ? to : from;
  if (own >= wire_->endpoints || (peer != kNobody && peer >= wire_->endpoints)) throw std::invalid_argument("no such endpoint");
  const uint32_t process = wire_->endpoint[to].process, place = held.place(kind, process);
  if (place == kNobody) throw std::runtime_error("2048 messages to one rank wait for their counterpart; wait for some of them");
  Post& it = wire_->post(kind, process, place);
  it.fault = Fault::kNone, it.source = from, it.target = to, it.tag = tag, it.number = wire_->numbers++;
  it.address = address, it.bytes = bytes, it.copying = 0, it.process = me_, it.other = kNobody, it.copied = 0;
  it.state.store(kPosted);
  const EndpointState mine = wire_->endpoint[own].state;
  const EndpointState theirs = peer == kNobody ? kOpen : wire_->endpoint[peer].state;
  if (mine != kOpen) held.fail(kind, process, place, Fault::kOwnGaveUp, Fault::kGaveUp);
  else if (theirs == kDead) held.fail(kind, process, place, Fault::kDied, Fault::kDied);
  else if (theirs == kBroken) held.fail(kind, process, place, Fault::kGaveUp, Fault::kGaveUp);
  else if (theirs != kOpen) held.fail(kind, process, place, Fault::kClosed, Fault::kClosed);
  else held.meet(kind, process, place);
  return {kind, process, place, it.generation, kNotStaged};
}

bool Card::is_over(const Handle& handle) {
  const uint32_t state = wire_->post(PostKind(handle.kind), handle.process, handle.place).state.load(std::memory_order_acquire);
  return state == kDone || state == kFailed;
}

Outcome Card::wait(const Handle& handle, int64_t deadline_ns) {
  check_process();
  Post& it = wire_->post(PostKind(handle.kind), handle.process, handle.place);
  if (it.generation != handle.generation) throw std::invalid_argument("this message was waited for already");
  for (;;) {
    const uint32_t state = it.state.load(std::memory_order_acquire);
    if (state == kDone || state == kFailed) break;
    if (steady_now_ns() >= deadline_ns) return {Fault::kTimeout, kNobody, 0};
    if (!futex_sleep(it.state, state, deadline_ns)) return {Fault::kSignal, kNobody, 0};
  }
  HeldWire held(*wire_);
  while (it.copying) {  // it failed under a copy, which writes to the caller's memory for a moment longer
    held.let_go();
    sched_yield();
    held.take();
  }
  const Outcome outcome{it.fault, it.source, it.copied};
  held.release(PostKind(handle.kind), handle.process, handle.place);
  held.let_go();
  if (handle.staged != kNotStaged) unstage(handle.staged);
  return outcome;
}

// ---- the card's own thread -------------------------------------------------------------------------------------------

void Card::serve() {
  run_as_hardware("weft_card");
  Process& self = wire_->process[me_];
  HeldWire held(*wire_);
  while (!is_over_) {
    held.advance();
    uint32_t place = kNobody;
    double wakes = 0;
    if (next_copy(held, &place, &wakes)) {
      copy(held, place);
      continue;
    }
    self.wakes = wakes;
    const uint32_t seen = self.bell;
    held.let_go();
    if (!is_over_) futex_sleep(self.bell, seen, std::isinf(wakes) ? INT64_MAX : wire_->epoch_ns + int64_t(std::ceil(wakes)));
    held.take();
    self.wakes = kAwake;
  }
}

// The receive whose bytes have waited longest; else when the next ones come.
bool Card::next_copy(HeldWire& held, uint32_t* place, double* wakes) {
  double first = std::numeric_limits<double>::infinity();
  each_used(wire_->inbox[me_], kReceive, [&](uint32_t at) {
    const Post& it = wire_->post(kReceive, me_, at);
    if (it.state != kFlowing && it.state != kWired) return;
    const double when = held.due(it);
    if (when < first) first = when, *place = at;
  });
  *wakes = first;
  return first <= wire_->clock();
}

void Card::copy(HeldWire& held, uint32_t place) {
  Post& it = wire_->post(kReceive, me_, place);
  const Post& send = wire_->send_of(me_, it);
  const uint64_t across = it.state == kWired ? it.bytes : uint64_t(it.moved);
  const uint64_t count = std::min(across - it.copied, kMostAtOnce);
  it.copying = 1;
  held.let_go();
  const Fault fault = count ? read(send, it, count) : Fault::kNone;
  held.take();
  it.copying = 0;
  const uint32_t state = it.state;
  if (state != kFlowing && state != kWired) return;  // it failed meanwhile
  if (fault != Fault::kNone) return held.fail(kReceive, me_, place, fault, fault);
  it.copied += count;
  if (state == kWired && it.copied == it.bytes && it.due <= wire_->clock()) held.finish(me_, place);
}

Fault Card::read(const Post& send, const Post& receive, uint64_t bytes) const {
  char* to = reinterpret_cast<char*>(receive.address) + receive.copied;
  if (send.process == me_ || !reads_memory()) {
    const char* base = reads_memory() ? reinterpret_cast<char*>(send.address) : staging_of(send.process) + send.address;
    std::memcpy(to, base + receive.copied, bytes);
    return Fault::kNone;
  }
  const pid_t pid = wire_->process[send.process].pid;
  for (uint64_t done = 0; done < bytes;) {
    const iovec here{to + done, bytes - done};
    const iovec there{reinterpret_cast<char*>(send.address) + receive.copied + done, bytes - done};
    const ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (got <= 0) return errno == ESRCH ? Fault::kDied : Fault::kUnreadable;
    done += uint64_t(got);
  }
  return Fault::kNone;
}

// ---- where memory may not be read -------------------------------------------------------------------------------------

char* Card::staging_of(uint32_t process) const {
  return reinterpret_cast<char*>(wire_) + Wire::bytes(0, 0) + wire_->staging * process;
}

uint64_t Card::stage(uint64_t address, uint64_t bytes) {
  std::unique_lock<std::mutex> lock(staging_mutex_);
  uint64_t at = 0;
  for (const auto& [start, size] : staged_) {
    if (start - at >= bytes) break;
    at = (start + size + 63) / 64 * 64;
  }
  if (at + bytes > wire_->staging)
    throw std::runtime_error("no room for a message of " + std::to_string(bytes) + " bytes in the lab's shared memory of " +
                             std::to_string(wire_->staging) + " bytes a rank; wait for earlier ones, or send less at once");
  staged_[at] = bytes;
  lock.unlock();
  std::memcpy(staging_of(me_) + at, reinterpret_cast<const void*>(address), bytes);
  return at;
}

void Card::unstage(uint64_t at) {
  std::lock_guard<std::mutex> lock(staging_mutex_);
  staged_.erase(at);
}

}  // namespace weft
