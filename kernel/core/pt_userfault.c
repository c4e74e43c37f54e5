// SPDX-License-Identifier: GPL-2.0
/* Userfaultfd is refused by a probe where it takes a mapping. See pt_userfault.h. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/static_call.h>

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_symbol.h"
#include "core/pt_userfault.h"

#define PROBED	"vma_modify_flags_uffd"

/* On kernels where userfaultfd takes nothing of ours. */
static struct vm_area_struct *refused(struct vma_iterator *iterator, struct vm_area_struct *previous,
				      struct vm_area_struct *vma, unsigned long start,
				      unsigned long end, unsigned long flags,
				      struct vm_userfaultfd_ctx context)
{
	return ERR_PTR(-EINVAL);
}

/* What the kernel has there, with the probe in it. */
DEFINE_STATIC_CALL(vellum_probed, refused);

static bool is_placed = true;

/* Is entered in place of the kernel's function, with its arguments. */
static noinline notrace struct vm_area_struct *refuse(void)
{
	return ERR_PTR(-EINVAL);
}

static bool is_ours(const struct vm_area_struct *vma)
{
	return vma->vm_ops && vma->vm_ops->may_split == pt_mount_vm_may_split;
}

static int look(struct kprobe *probe, struct pt_regs *regs)
{
	const struct vm_area_struct *vma = (void *)regs_get_kernel_argument(regs, 2);

	if (!is_ours(vma))
		return 0;
	instruction_pointer_set(regs, (unsigned long)refuse);
	return 1;
}

/* A probe with nothing to do afterwards would not be allowed to lead elsewhere. */
static void after(struct kprobe *probe, struct pt_regs *regs, unsigned long flags)
{
}

/* Nothing but userfaultfd calls it, to begin or to end: the latter never concerns ours. */
static struct kprobe probe = {
	.symbol_name = PROBED,
	.pre_handler = look,
	.post_handler = after,
};

void pt_userfault_init(void)
{
	void *probed;

	if (!userfault_takes_all())
		return;
	probed = pt_symbol_find(PROBED);
	is_placed = probed && !register_kprobe(&probe);
	if (is_placed)
		static_call_update(vellum_probed, probed);
	else
		pr_warn("userfaultfd cannot be kept away: nothing will be mapped\n");
}

void pt_userfault_exit(void)
{
	if (probe.addr && is_placed)
		unregister_kprobe(&probe);
}

/*
 * Probes can be switched off, all at once, and do not know it (debugfs, kernel.ftrace_enabled). So
 * the function is called for a mapping that looks like ours. It would do nothing, if it were to be
 * reached: the mapping is special, and all of it is to have the flags that it has.
 */
bool pt_userfault_is_refused(struct mm_struct *mm)
{
	static const struct vm_operations_struct ours = { .may_split = pt_mount_vm_may_split };
	struct vm_area_struct vma = { .vm_mm = mm, .vm_end = PAGE_SIZE, .vm_ops = &ours };
	struct vma_iterator iterator;
	struct vm_area_struct *answer;

	if (!is_placed)
		return false;
	mmap_assert_write_locked(mm);
	vma_iter_init(&iterator, mm, 0);
	pt_vma_init_flags(&vma, VM_SHARED | VM_PFNMAP | VM_IO);
	answer = static_call(vellum_probed)(&iterator, NULL, &vma, vma.vm_start, vma.vm_end,
					    vma.vm_flags, NULL_VM_UFFD_CTX);
	return answer == ERR_PTR(-EINVAL);
}
