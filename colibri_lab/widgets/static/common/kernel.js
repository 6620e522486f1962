// Whether Python can answer. Hosts differ, so everything here is asked with care; a host that tells nothing counts as alive.

// How to interrupt the kernel: the only way to stop a cell, for no message is heard while one runs. Null where the host does not offer it.
export function interrupter(model) {
  const kernel = model.widget_manager?.kernel;
  return kernel?.interrupt ? () => kernel.interrupt() : null;
}

// Calls `tell` with "idle", "busy" or "gone"; returns how to stop watching. A restarted kernel has forgotten this view: it is gone for good.
export function watchKernel(model, tell) {
  const saved = model.get("_page");
  if (saved) {
    tell("page");
    return () => {};
  }
  const kernel = model.widget_manager?.kernel;
  if (!kernel?.statusChanged?.connect) return () => {};
  let gone = false;
  const look = () => {
    if (["dead", "restarting", "autorestarting", "terminating"].includes(kernel.status) || kernel.isDisposed) gone = true;
    tell(gone ? "gone" : kernel.status === "busy" ? "busy" : "idle");
  };
  const connection = (_, status) => (status === "connected" ? look() : !gone && tell("lost"));
  const disposed = () => {
    gone = true;
    tell("gone");
  };
  kernel.statusChanged.connect(look);
  kernel.connectionStatusChanged?.connect(connection);
  kernel.disposed?.connect(disposed);
  look();
  return () => {
    kernel.statusChanged.disconnect(look);
    kernel.connectionStatusChanged?.disconnect(connection);
    kernel.disposed?.disconnect(disposed);
  };
}

// The kernel answers where it spoke last: after a cell moved a view, that is the main shell, where the view's next request would wait for the
// next cell to end. Python's answer to "seen" brings the view back to a shell of its own. Call what this returns whenever Python has spoken.
export function keepOwnShell(model, able) {
  let soon = null;
  return () => {
    soon ||= setTimeout(() => {
      soon = null;
      if (able()) model.send({ kind: "seen" });
    });
  };
}
