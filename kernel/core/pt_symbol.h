/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The few functions that the kernel does not export and that the module calls where it finds them.
 *
 * A kprobe finds them. The module calls them by a static call, which is a direct call. An indirect
 * call would fault on CPUs that check the targets of branches: the kernel removes the function's
 * landing pad at boot, because nothing takes its address.
 */
#ifndef VELLUM_PT_SYMBOL_H
#define VELLUM_PT_SYMBOL_H

/* Returns the address of a function, or NULL. */
void *pt_symbol_find(const char *name);

#endif /* VELLUM_PT_SYMBOL_H */
