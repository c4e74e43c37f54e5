// SPDX-License-Identifier: GPL-2.0
/*
 * Registers notifiers of a process' memory.
 *
 * The core does not register one while a signal, a stop, a debugger, the freezer or work of
 * io_uring waits for the thread. The thread is in mmap or in a fault, and cannot be told to try
 * again, so those wait. A signal mask does not keep all of them away.
 */

#include <linux/sched/signal.h>

#include "core/pt_notifier.h"

int pt_notifier_insert(int (*insert)(void *data), void *data)
{
	sigset_t others, before;
	bool work = false, signal = false;
	int error;

	siginitsetinv(&others, sigmask(SIGKILL));
	sigprocmask(SIG_SETMASK, &others, &before);
	do {
		error = -EINTR;
		if (fatal_signal_pending(current))
			break;
		signal |= test_and_clear_thread_flag(TIF_SIGPENDING);
		work |= test_and_clear_thread_flag(TIF_NOTIFY_SIGNAL);
		error = insert(data);
	} while (error == -EINTR);
	sigprocmask(SIG_SETMASK, &before, NULL);
	if (signal)
		set_thread_flag(TIF_SIGPENDING);
	if (work)
		set_thread_flag(TIF_NOTIFY_SIGNAL);
	return error;
}
