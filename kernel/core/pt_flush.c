// SPDX-License-Identifier: GPL-2.0
/*
 * Two ways to flush the TLBs of a process on all CPUs.
 *
 * The kernel itself uses flush_tlb_mm_range(). It is not exported, but the module may find it
 * (pt_symbol.h).
 *
 * Where the module does not find it, or the parameter flush=exported says so, the module advances
 * the generation of the address space, and every CPU that runs it flushes everything. All that this
 * needs is exported. A CPU that does not run the address space compares generations before it does.
 * Devices that share the process' page tables must be told as well. If only a function that is not
 * exported can tell them, and the module does not find it, the module does not load.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/moduleparam.h>
#include <linux/smp.h>
#include <linux/static_call.h>
#include <asm/tlbflush.h>

#include "core/compat.h"
#include "core/pt_flush.h"
#include "core/pt_symbol.h"

static char *pt_flush_mode = "direct";
module_param_named(flush, pt_flush_mode, charp, 0444);
MODULE_PARM_DESC(flush, "direct: the kernel's own way (default); exported: slower");

static void pt_flush_this_cpu(void *unused)
{
	preempt_disable();
	__flush_tlb_all();
	preempt_enable();
}

static void pt_flush_tell_no_device(struct mm_struct *mm, unsigned long start, unsigned long end)
{
}

DEFINE_STATIC_CALL(vellum_tell_devices, pt_flush_tell_no_device);

static void pt_flush_exported(struct mm_struct *mm, unsigned long start, unsigned long end,
			      unsigned int stride_shift, bool freed_tables)
{
	/* Entries were cleared before. No CPU may see the generation advance before that. */
	smp_mb__before_atomic();
	atomic64_inc(&mm->context.tlb_gen);
	smp_mb__after_atomic(); /* advanced before the mask of CPUs is read */
	on_each_cpu_cond_mask(NULL, pt_flush_this_cpu, NULL, true, mm_cpumask(mm));
	if (mm_has_notifiers(mm))
		static_call(vellum_tell_devices)(mm, start, end);
}

DEFINE_STATIC_CALL(vellum_flush, pt_flush_exported);

bool pt_flush_is_direct(void)
{
	return static_call_query(vellum_flush) != (void *)pt_flush_exported;
}

static int pt_flush_find_devices(void)
{
	void *function;

	if (!pt_flush_tells_devices())
		return 0;
	function = pt_symbol_find("__mmu_notifier_arch_invalidate_secondary_tlbs");
	if (!function) {
		pr_err("no function to tell devices that share page tables of flushes\n");
		return -EOPNOTSUPP;
	}
	static_call_update(vellum_tell_devices, function);
	return 0;
}

int pt_flush_init(void)
{
	void *function;

	if (!strcmp(pt_flush_mode, "exported"))
		return pt_flush_find_devices();
	if (strcmp(pt_flush_mode, "direct")) {
		pr_err("flush=%s: must be direct or exported\n", pt_flush_mode);
		return -EINVAL;
	}
	function = pt_symbol_find("flush_tlb_mm_range");
	if (!function) {
		pr_warn("flush_tlb_mm_range not found; TLB flushes are slower\n");
		return pt_flush_find_devices();
	}
	static_call_update(vellum_flush, function);
	return 0;
}

void pt_flush_range(struct mm_struct *mm, unsigned long start, unsigned long end)
{
	static_call(vellum_flush)(mm, start, end, PAGE_SHIFT, false);
}

void pt_flush_huge(struct mm_struct *mm, unsigned long start)
{
	static_call(vellum_flush)(mm, start, start + PMD_SIZE, PMD_SHIFT, false);
}

void pt_flush_all(struct mm_struct *mm)
{
	pt_flush_range(mm, 0, TLB_FLUSH_ALL);
}

void pt_flush_tables(struct mm_struct *mm, unsigned long start, unsigned long end)
{
	static_call(vellum_flush)(mm, start, end, PAGE_SHIFT, true);
}
