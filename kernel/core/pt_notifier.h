/* SPDX-License-Identifier: GPL-2.0 */
#ifndef VELLUM_PT_NOTIFIER_H
#define VELLUM_PT_NOTIFIER_H

/*
 * Calls a function that registers a notifier, for a thread in mmap or in a fault, until no signal
 * keeps it from that. Returns what the function returns, or -EINTR: the thread is to be killed.
 */
int pt_notifier_insert(int (*insert)(void *data), void *data);

#endif /* VELLUM_PT_NOTIFIER_H */
