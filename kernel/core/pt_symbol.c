// SPDX-License-Identifier: GPL-2.0
/* Finds functions that the kernel does not export. pt_symbol.h says how they are called. */

#include <linux/kallsyms.h>
#include <linux/kprobes.h>

#include "core/pt_symbol.h"

void *pt_symbol_find(const char *name)
{
	struct kprobe probe = { .symbol_name = name };
	unsigned long address, offset;
	char symbol[KSYM_SYMBOL_LEN];
	char *tail = symbol + strlen(name);

	if (register_kprobe(&probe))
		return NULL;
	address = (unsigned long)probe.addr;
	unregister_kprobe(&probe);

	/* The probe may lie after the landing pad, at "name+0x4/0x120". */
	sprint_symbol(symbol, address);
	if (strncmp(symbol, name, strlen(name)) || sscanf(tail, "+%lx/", &offset) != 1 ||
	    offset > 4)
		return NULL;
	return (void *)(address - offset);
}
